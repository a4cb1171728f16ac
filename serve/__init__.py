"""Launch engines and serve the champion."""
