"""Models that one task trains, as large as HAP (EuroSys 2024) was measured on."""
