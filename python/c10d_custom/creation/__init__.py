"""How the ranks of a group meet before there is a transport: who they are, where, whether they are alive, what they
tell each other through the store. Imported by transport/ and c10d/."""
