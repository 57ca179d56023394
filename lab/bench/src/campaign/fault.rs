//! Faults, by class, number and seed.

use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A class of faults. All but the first are bit flips at random places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// The kernel's own crash types (LKDTM), one after the other.
    Lkdtm,
    /// A bit of an instruction, in a function that is called all the time.
    Code,
    /// A bit of a general register, at the next call of such a function.
    Registers,
    /// Bits of a task's kernel stack, in the part that is in use.
    Stack,
    /// Bits of the slab allocator's pages.
    Slab,
    /// Bits of the kernel's writable data.
    Data,
    /// A bit of an entry, of any level, in the page tables of a process or of the kernel.
    PageTables,
    /// No fault. Each death is a false alarm, or the deed of the emulator.
    Control,
}

impl Class {
    /// Returns the class's name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lkdtm => "LKDTM",
            Self::Code => "code",
            Self::Registers => "registers",
            Self::Stack => "stack",
            Self::Slab => "slab",
            Self::Data => "data",
            Self::PageTables => "page tables",
            Self::Control => "no fault",
        }
    }

    /// Returns true if the test module prints the places of these faults before it flips bits there.
    #[must_use]
    pub fn prints_places(self) -> bool {
        !matches!(self, Self::Lkdtm | Self::Control)
    }
}

/// Bits that a fault of these classes flips. Most single bits there are never read again.
pub const STACK_BITS: u32 = 4;
pub const SLAB_BITS: u32 = 64;
pub const DATA_BITS: u32 = 16;

/// The time in which a fault has to show itself: most of them, and lockups, which the kernel's own detectors
/// have to notice.
const SOON: Duration = Duration::from_secs(2);
const LATE: Duration = Duration::from_secs(20);

/// A fault to inject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub class: Class,
    /// The number among the faults of its class and seed.
    pub number: u64,
    /// The crash type, or the command to the test module.
    pub name: String,
    /// The seed of this fault's chances.
    pub seed: u64,
    /// The time in which it has to show itself.
    pub shows_within: Duration,
}

impl Fault {
    /// Returns a fault of a campaign. `lkdtm_types` are the crash types that the kernel's module has.
    #[must_use]
    pub fn new(campaign: u64, class: Class, number: u64, lkdtm_types: &[String]) -> Self {
        let seed = mix(campaign ^ mix((class as u64) << 32 | number));
        let name = match class {
            Class::Lkdtm => {
                let place = number as usize % lkdtm_types.len().max(1);
                lkdtm_types.get(place).cloned().unwrap_or_default()
            }
            Class::Code => format!("flip-code {seed}"),
            Class::Registers => format!("flip-register {seed}"),
            Class::Stack => format!("flip-stack {seed} {STACK_BITS}"),
            Class::Slab => format!("flip-slab {seed} {SLAB_BITS}"),
            Class::Data => format!("flip-data {seed} {DATA_BITS}"),
            Class::PageTables => format!("flip-page-table {seed}"),
            Class::Control => "nothing".to_owned(),
        };
        let is_late =
            class == Class::Lkdtm && ["LOCKUP", "LOOP", "HUNG"].iter().any(|word| name.contains(word));
        Self { class, number, name, seed, shows_within: if is_late { LATE } else { SOON } }
    }

    /// Returns the command line that injects the fault in the machine.
    #[must_use]
    pub fn line(&self) -> String {
        let file = match self.class {
            Class::Control => return "true".to_owned(),
            Class::Lkdtm => "/sys/kernel/debug/provoke-crash/DIRECT",
            _ => "/dev/mercury_test",
        };
        let line = format!("echo {} > {file}", self.name);
        // The first time the lock is taken, and the second time it is waited for.
        if self.name == "SPINLOCKUP" { format!("{line}; {line}") } else { line }
    }

    /// Returns a time by chance before `end`.
    #[must_use]
    pub fn moment(&self, end: Duration) -> Duration {
        end.mul_f64((mix(self.seed) >> 11) as f64 / (1_u64 << 53) as f64)
    }
}

/// Returns a number in which each bit depends on all bits of `number` (splitmix64).
fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_can_be_repeated() {
        let types = ["BUG".to_owned(), "SOFTLOCKUP".to_owned()];
        let fault = |seed, class, number| Fault::new(seed, class, number, &types);
        assert_eq!(fault(1, Class::Code, 5), fault(1, Class::Code, 5));
        for other in [fault(2, Class::Code, 5), fault(1, Class::Code, 6), fault(1, Class::Registers, 5)] {
            assert_ne!(other.seed, fault(1, Class::Code, 5).seed);
        }
        let lockup = fault(1, Class::Lkdtm, 3);
        assert_eq!(lockup.line(), "echo SOFTLOCKUP > /sys/kernel/debug/provoke-crash/DIRECT");
        let twice = Fault::new(1, Class::Lkdtm, 0, &["SPINLOCKUP".to_owned()]).line();
        assert_eq!(twice.matches("echo SPINLOCKUP").count(), 2);
        assert!(lockup.shows_within > fault(1, Class::Lkdtm, 2).shows_within);
        assert!(fault(1, Class::Slab, 0).line().ends_with(" 64 > /dev/mercury_test"));
        assert_eq!(fault(1, Class::Control, 0).line(), "true");
    }

    #[test]
    fn moments_are_spread() {
        let moment = |number| Fault::new(1, Class::Code, number, &[]).moment(Duration::from_secs(30));
        let all: Vec<_> = (0..100).map(moment).collect();
        assert!(all.iter().all(|moment| *moment < Duration::from_secs(30)));
        let early = all.iter().filter(|moment| **moment < Duration::from_secs(15)).count();
        assert!((30..70).contains(&early), "{early}");
    }
}
