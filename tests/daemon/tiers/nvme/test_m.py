from machines import in_first_ring
from nvme_machine import NvmeMachine
TestTier = in_first_ring(NvmeMachine, examples=20, steps=40)
