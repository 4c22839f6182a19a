"""`tiercache lint`: what in prompts keeps their beginnings from being reused.

    command ──► prompts    files to prompts, each a text with named parts
            ──► changing   times and ids at the front of one prompt
            ──► compare    what differs between prompts that are otherwise alike; causes: why
            ──► findings   printed: where, how much is lost, what to do

Findings go by cost: nothing is said of what costs less than a tenth of a prompt.
"""
