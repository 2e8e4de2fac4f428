"""What runs under llm-compressor's interpreter: started as a program, without anything of the suite."""
