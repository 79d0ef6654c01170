"""From a task's forward to a graph whose values are known."""
