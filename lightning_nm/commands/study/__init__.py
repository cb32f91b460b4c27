"""``lightning-nm study``: trainings of variants on paired seeds, compared with intervals. Needs the extra ``study``."""
