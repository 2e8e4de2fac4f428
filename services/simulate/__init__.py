"""A fleet in virtual time: how many engines a load needs, and what bursts and losses do to it."""
