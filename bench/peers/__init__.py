"""The programs that shardrt is measured against. They import nothing of shardrt, so its settings stay out."""
