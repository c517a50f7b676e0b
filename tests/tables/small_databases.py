"""Databases of three tables that the tests share, in SQLite files made here."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from fathom.data import train_bpe

# `person` and `town` refer to each other, `visit` to both.
SCRIPT = """
CREATE TABLE town (town_id INTEGER PRIMARY KEY, name TEXT, head INTEGER REFERENCES person(person_id), big BOOLEAN);
CREATE TABLE person (person_id INTEGER PRIMARY KEY, fullName VARCHAR(20), age REAL, town_id INTEGER,
    FOREIGN KEY (town_id) REFERENCES town(town_id));
CREATE TABLE visit (person_id INTEGER REFERENCES person(person_id), town_id INTEGER REFERENCES town, day DATE);
INSERT INTO town VALUES (1, 'Upper Brome', 1, 1), (2, 'Lind', 2, 0);
INSERT INTO person VALUES (1, 'Ada Pell', 30.0, 1), (2, 'Bo Quist', 41.5, 1), (3, 'Cy', NULL, 2);
INSERT INTO visit VALUES (1, 2, '2020-01-03'), (2, 2, '2020-01-04'), (2, 1, '2021-07-01');
"""


def make(folder: Path, name: str = "county", script: str = SCRIPT) -> Path:
    path = folder / f"{name}.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.commit()
    connection.close()
    return path


def tokenizer(vocabulary: int = 400):
    words = "what is the name of every person and town on that day who visited Upper Brome from Lind head age visit big"
    return train_bpe(
        [f"{words} | county | town : town_id , name , head [ Upper Brome ; Lind ] full select"] * 9, vocabulary
    )
