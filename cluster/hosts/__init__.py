"""Where `ray.remote` meets the plain classes: what each actor hosts, and its handles."""
