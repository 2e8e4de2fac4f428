"""Low-rank adapters beside the model: PEFT's folders, read into slots while others compute."""
