"""Room: backends -- an engine or a trainer behind our doors, one folder a system.

Floor 3. Imports: everything below. Never: another backend. Only launch names them, and imports only the chosen ones.
"""
