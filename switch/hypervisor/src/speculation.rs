//! Branch predictions that user mode or a guest has trained, forgotten before the hypervisor maps the
//! system's memory (HARDWARE A-18, I-23).
//!
//! The hypervisor's page tables map its own memory alone. While there is a snapshot or a dirty log, some
//! exits need the system's memory as well, and user mode can force such an exit by a write. So beneath a
//! snapshot or a dirty log every exit for compiled code forgets predictions first, in the straight-line
//! code of the world switch. The memory is mapped only after that (`with_memory` in
//! `snapshot/system_memory.rs`).
//!
//! * Return predictor: 32 calls fill it with addresses at which no code goes on. The hypervisor's own
//!   returns never use up so many. So no processor comes to older entries, or falls back to another
//!   predictor (SDM, "Return stack buffer underflow").
//! * AMD's processors up to family 19h predict returns, and more, from branch targets that user mode has
//!   trained (retbleed, SRSO). There the barrier MSR (IA32_PRED_CMD, IBPB) is written, unless CPUID says
//!   that the processor is not affected, or the kernel was started without mitigations.
//! * Indirect branches: there is none (`lab/tests/image.rs`), so Intel's processors need no other barrier.
//!
//! VERW before the next entry overwrites the memory's traces in the processor's buffers.

use mercury_abi::facts::{CpuFacts, system};

/// [`crate::cpu::Cpu::barriers`]: IA32_PRED_CMD is to be written.
pub const IBPB: u32 = 1 << 0;

/// Entries of the return predictor that are filled.
pub const RETURN_ENTRIES: u32 = 32;

/// Chooses the barriers that this processor needs beyond filling the return predictor.
#[must_use]
pub const fn barriers(facts: &CpuFacts) -> u32 {
    /// CPUID 8000_0008h EBX: the processor has the barrier. Of AMD's alone; Intel's leave the register 0.
    const HAS_IBPB: u32 = 1 << 12;
    /// CPUID 8000_0021h EAX (SRSO_NO): returns are not predicted from what others have trained.
    const RETURNS_ARE_SAFE: u32 = 1 << 29;
    let affected =
        facts.cpuid_8000_0008.ebx & HAS_IBPB != 0 && facts.cpuid_8000_0021.eax & RETURNS_ARE_SAFE == 0;
    if affected && facts.system & system::MITIGATIONS_OFF == 0 { IBPB } else { 0 }
}

/// Forgets predictions: RDI = the CPU's area. Changes RAX, RCX, RDX and flags. The LFENCE holds back what
/// was begun on a misprediction of the jump itself.
#[cfg(feature = "image")]
macro_rules! forget_predictions {
    () => {
        concat!(
            "test dword ptr [rdi + {barriers}], {ibpb}\n",
            "jz 41f\n",
            "mov ecx, {pred_cmd}\n",
            "mov eax, 1\n",
            "xor edx, edx\n",
            "wrmsr\n",
            "41:\n",
            ".rept {return_entries}\n",
            "call 42f\n",
            "int3\n",
            "42:\n",
            ".endr\n",
            "add rsp, 8 * {return_entries}\n",
            "lfence",
        )
    };
}

#[cfg(feature = "image")]
pub(crate) use forget_predictions;

#[cfg(test)]
mod tests {
    use mercury_preflight::example::{good_epyc, good_xeon};

    use super::*;

    #[test]
    fn the_barrier_is_for_processors_that_need_it() {
        let with = |eax: u32, off: u64| {
            let mut facts = good_epyc(0);
            facts.cpuid_8000_0008.ebx |= 1 << 12;
            facts.cpuid_8000_0021.eax = eax;
            facts.system |= off;
            barriers(&facts)
        };
        assert_eq!(with(0, 0), IBPB);
        assert_eq!(with(1 << 29, 0), 0, "not affected");
        assert_eq!(with(1 << 30, 0), IBPB, "not affected between user mode and the kernel alone");
        assert_eq!(with(0, system::MITIGATIONS_OFF), 0);
        let mut without = good_epyc(0);
        without.cpuid_8000_0008.ebx &= !(1 << 12);
        assert_eq!((barriers(&without), barriers(&good_xeon(0))), (0, 0));
    }
}
