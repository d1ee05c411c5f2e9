"""How a tensor becomes codes and scales: scale rules, blocks, zero points and logarithmic tiles."""
