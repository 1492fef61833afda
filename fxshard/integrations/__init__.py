"""fxshard under libraries that own the training loop; each module needs its library: docs/integrations.md."""
