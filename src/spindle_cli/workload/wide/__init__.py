"""What is computed in float64, whatever code and traces say of float32."""
