"""The torch side: what runs inside the processes of a cell, one a rank."""
