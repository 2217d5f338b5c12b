"""Images, video and audio of a prompt: read within limits, encoded by the model's own towers, merged into its rows."""
