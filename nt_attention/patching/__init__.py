"""Put padding-free attention into models that exist, and take it out again."""
