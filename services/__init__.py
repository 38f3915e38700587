"""The services of Offbeat, each started as ``python -m services.NAME --recipe FILE``.

A service imports `offbeat`, never another service.
"""
