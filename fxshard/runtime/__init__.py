"""What lives while a model trains: units, their flat shards, gradients, and checks across ranks."""
