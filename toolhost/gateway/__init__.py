"""The Responses API over the loop: HTTP in, history and background runs kept in a store that replicas may share."""
