"""Room on the cluster: joining it, roles, resources, storage that its nodes share."""
