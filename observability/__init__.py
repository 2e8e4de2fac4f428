"""What services emit (`emit`), and what reads it again (`analysis`). See DESIGN.md."""
