"""PAME's rehearsal: which exits serve a load best, tried on recorded answers (section 6)."""
