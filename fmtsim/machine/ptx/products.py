def product_run(body, start): return 1
def prepare_product(run, threads):
    def f(block, active): raise NotImplementedError
    return f
