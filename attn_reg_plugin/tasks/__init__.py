"""fairseq tasks of the plugin; fairseq imports the files of this folder when it is given as --user-dir."""
