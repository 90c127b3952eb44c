"""Generator of a small `deepseek_v41` EXL3 checkpoint and of everything that is fetched beside it.

It stands in for the Hugging Face repositories of the real model: same names, same dtypes, same layout, small
dimensions. It shares no code with `plugins/` nor with the lab engine, so that each reads what another wrote.
"""
