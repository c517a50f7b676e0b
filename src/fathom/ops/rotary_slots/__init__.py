"""Rotation of stored keys or of queries at positions start, start + 1, …"""
