"""The life of one request: validate, prepare, reserve, admit, route, stream, settle. Both faces use it."""
