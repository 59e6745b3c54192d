"""Asking the parties: does everyone score the same tokens alike, at T and beside it?"""
