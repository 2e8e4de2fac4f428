"""A model that several processes of this machine compute together: who leads them, and who follows."""
