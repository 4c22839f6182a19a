from machines import in_first_ring, in_stress
from nvme_machine import NvmeMachine

TestTier = in_first_ring(NvmeMachine, examples=100, steps=50)
