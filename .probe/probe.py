import sys, hashlib, numpy as np, torch, time
OUT=sys.argv[1]
src=r'''
extern "C" __global__ void f32op(const unsigned* x, unsigned* y, unsigned long long n, unsigned base, unsigned stride, int op) {
  for (unsigned long long i = blockIdx.x*(unsigned long long)blockDim.x+threadIdx.x; i<n; i+=(unsigned long long)gridDim.x*blockDim.x) {
    unsigned u = base + (unsigned)(i*stride), r=0; 
    if (op==0) asm("tanh.approx.f32 %0, %1;" : "=r"(r) : "r"(u));
    if (op==1) asm("{.reg .b16 a,b; mov.b32 {a,b}, %1; tanh.approx.f16 a, a; mov.b32 %0, {a,b};}" : "=r"(r) : "r"(u));
    if (op==2) asm("{.reg .b16 a,b; mov.b32 {a,b}, %1; tanh.approx.bf16 a, a; mov.b32 %0, {a,b};}" : "=r"(r) : "r"(u));
    if (op==3) asm("{.reg .b16 a,b; mov.b32 {a,b}, %1; ex2.approx.f16 a, a; mov.b32 %0, {a,b};}" : "=r"(r) : "r"(u));
    if (op==4) asm("{.reg .b16 a,b; mov.b32 {a,b}, %1; ex2.approx.ftz.bf16 a, a; mov.b32 %0, {a,b};}" : "=r"(r) : "r"(u));
    if (op==5) { asm("{.reg .f64 d; .reg .b32 lo; mov.b64 d, {%2, %1}; rcp.approx.ftz.f64 d, d; mov.b64 {lo, %0}, d;}" : "=r"(r) : "r"(u), "r"(0u)); }
    if (op==6) { asm("{.reg .f64 d; .reg .b32 lo; mov.b64 d, {%2, %1}; rsqrt.approx.ftz.f64 d, d; mov.b64 {lo, %0}, d;}" : "=r"(r) : "r"(u), "r"(0u)); }
    if (op==7) { asm("{.reg .f64 d; .reg .b32 lo; mov.b64 d, {%2, %1}; rcp.approx.ftz.f64 d, d; mov.b64 {%0, lo}, d;}" : "=r"(r) : "r"(u), "r"(12345u)); }
    y[i]=r; } }
'''
k=torch.cuda._compile_kernel(src,'f32op')
def run(op,base,n,stride=1):
    y=torch.empty(n,dtype=torch.int32,device='cuda'); k((1320,1,1),(256,1,1),(y,y,n,base if base<2**31 else base-2**32,stride,op)); torch.cuda.synchronize(); return y
out={}
t=time.time()
out['tanh_sample']=run(0,0,2**25,64).cpu().numpy().view(np.uint32)[ (0x30000000>>6):(0x42000000>>6) ]
out['tanh_neg_same']=np.array([bool(((run(0,0x80000000+c*2**24,2**24)^run(0,c*2**24,2**24)).cpu().numpy().view(np.uint32)==0x80000000).all()) for c in range(0,127)])
h=[]
for c in range(256):
    h.append(hashlib.sha256(run(0,(c<<24),2**24).cpu().numpy().tobytes()).hexdigest()[:16])
out['tanh_hash']=np.array(h)
for op,nm in ((1,'tanh_f16'),(2,'tanh_bf16'),(3,'ex2_f16'),(4,'ex2_bf16')): out[nm]=run(op,0,65536).cpu().numpy().view(np.uint32).astype(np.uint16)
out['rcp64']=run(5,0x3ff00000,2**20).cpu().numpy().view(np.uint32)
out['rcp64_exp']=run(5,0,2**15,2**17).cpu().numpy().view(np.uint32)
out['rcp64_low']=run(7,0x3ff00000,64).cpu().numpy().view(np.uint32)
out['rsq64']=run(6,0x3ff00000,2**21).cpu().numpy().view(np.uint32)
out['rsq64_exp']=run(6,0,2**15,2**17).cpu().numpy().view(np.uint32)
np.savez_compressed(OUT+'/mufu.npz',**out); print('probe',time.time()-t,torch.cuda.get_device_name(), {k:v.shape for k,v in out.items()})
