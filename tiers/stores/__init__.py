"""Where files can lie: folders and buckets behind one seam."""
