//! Instructions and registers of the processor, each in the smallest wrapper that it can have.
//!
//! [`Hardware`] is what the exit handlers need of the processor; tests put a model in its place.

pub mod msr;

use core::arch::asm;

/// RFLAGS.TF.
pub const RFLAGS_TF: u64 = 1 << 8;
/// DR6.BS: a single step caused the debug exception (APM vol. 2, 13.1.1.3).
pub const DR6_BS: u64 = 1 << 14;
/// DR7 with every breakpoint off (bit 10 reads as one).
pub const DR7_CLEAR: u64 = 0x400;
/// CR4.PGE.
pub const CR4_PGE: u64 = 1 << 7;
/// CR0 in the hypervisor: PE, MP, ET, NE, WP, PG and nothing that the system above has set.
pub const HOST_CR0: u64 = 0x8001_0033;

/// The processor as the exit handlers see it.
pub trait Hardware {
    /// Reads an MSR; `None` if the processor raised #GP.
    fn read_msr(&mut self, index: u32) -> Option<u64>;
    /// Writes an MSR; `false` if the processor raised #GP.
    #[must_use]
    fn write_msr(&mut self, index: u32, value: u64) -> bool;
    /// The time-stamp counter.
    fn tsc(&mut self) -> u64;
    /// CR2.
    fn cr2(&mut self) -> u64;
    /// DR6.
    fn dr6(&mut self) -> u64;
    /// DR7.
    fn dr7(&mut self) -> u64;
}

/// The value of a control or debug register.
macro_rules! read_register {
    ($register:literal) => {{
        let value: u64;
        // SAFETY: reading this register at CPL 0 has no side effect.
        unsafe {
            asm!(concat!("mov {}, ", $register), out(reg) value, options(nomem, nostack, preserves_flags));
        }
        value
    }};
}

/// The processor that this code runs on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Processor;

impl Hardware for Processor {
    #[inline]
    fn read_msr(&mut self, index: u32) -> Option<u64> {
        msr::read(index)
    }

    #[inline]
    fn write_msr(&mut self, index: u32, value: u64) -> bool {
        msr::write(index, value)
    }

    #[inline]
    fn tsc(&mut self) -> u64 {
        // SAFETY: RDTSC has no side effect; CR4.TSD does not bind CPL 0.
        unsafe { core::arch::x86_64::_rdtsc() }
    }

    #[inline]
    fn cr2(&mut self) -> u64 {
        read_register!("cr2")
    }

    #[inline]
    fn dr6(&mut self) -> u64 {
        read_register!("dr6")
    }

    #[inline]
    fn dr7(&mut self) -> u64 {
        read_register!("dr7")
    }
}
