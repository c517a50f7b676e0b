def filters(config):
    return []
