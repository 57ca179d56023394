//! Patterns in every register of the extended state: x87, SSE, AVX, AVX-512 with its masks, MXCSR
//! and the x87 control word. XRSTOR loads the registers, the processor spins, and XSAVE stores
//! them, with no system call in between.

use core::arch::{asm, x86_64::__cpuid_count, x86_64::_xgetbv};
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    slice,
};

use crate::{Result, cpus, report::Report, rng::Rng, stop::Stop};

/// The components x87, SSE, AVX, opmask, ZMM_Hi256 and Hi16_ZMM. Protection keys must not be
/// changed.
const COMPONENTS: u64 = 0xE7;
const LEGACY_SIZE: usize = 512;
const ROUNDS: u64 = 40_000;
/// Control words: rounding to nearest, extended precision, all exceptions masked; and an unusual
/// rounding.
const CONTROL_WORDS: [u16; 2] = [0x037F, 0x0F7F];
const MXCSR: [u32; 2] = [0x1F80, 0x7F80];

/// Spins on each CPU with registers full of patterns.
pub fn run(stop: &Stop, report: &mut Report) -> Result<()> {
    let components = usable_components()?;
    report.fact("components", format!("{components:#x}"));
    cpus::on_each(stop, report, |cpu, stop, report| {
        let mut rng = Rng::new(cpu as u64);
        let (mut before, mut after) = (Area::new()?, Area::new()?);
        while !stop.is_set() {
            before.fill(&mut rng, components);
            after.bytes().fill(0);
            spin(&before, &mut after, components);
            let differs = differences(before.bytes(), after.bytes(), components);
            report.check(differs.is_empty(), || format!("CPU {cpu}: {}", differs.join(", ")));
            report.pass();
        }
        Ok(())
    })
}

fn usable_components() -> Result<u64> {
    const OSXSAVE: u32 = 1 << 27;
    if __cpuid_count(1, 0).ecx & OSXSAVE == 0 {
        return Err("this processor has no XSAVE".into());
    }
    // SAFETY: CPUID says that XGETBV is there.
    Ok(unsafe { xgetbv() } & COMPONENTS)
}

#[target_feature(enable = "xsave")]
unsafe fn xgetbv() -> u64 {
    // SAFETY: register 0 exists wherever XGETBV does.
    unsafe { _xgetbv(0) }
}

/// Returns the place of a component in an area of the standard format.
fn component(number: u32) -> std::ops::Range<usize> {
    let leaf = __cpuid_count(0xD, number);
    leaf.ebx as usize..(leaf.ebx + leaf.eax) as usize
}

fn extended(components: u64) -> impl Iterator<Item = std::ops::Range<usize>> {
    (2..8).filter(move |number| components & 1 << number != 0).map(component)
}

/// A memory area for XSAVE.
struct Area {
    memory: *mut u8,
    layout: Layout,
}

impl Area {
    fn new() -> Result<Self> {
        let layout = Layout::from_size_align(__cpuid_count(0xD, 0).ebx as usize, 64)?;
        // SAFETY: CPUID reports at least the legacy area and the header.
        let memory = unsafe { alloc_zeroed(layout) };
        if memory.is_null() { Err("no memory".into()) } else { Ok(Self { memory, layout }) }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this size, initialised, and borrowed with `self`.
        unsafe { slice::from_raw_parts_mut(self.memory, self.layout.size()) }
    }

    /// Fills the area with random registers that are legal to load.
    fn fill(&mut self, rng: &mut Rng, components: u64) {
        let bytes = self.bytes();
        bytes.fill(0);
        bytes[..2].copy_from_slice(&rng.pick(&CONTROL_WORDS).to_le_bytes());
        // All eight x87 registers are in use.
        bytes[4] = 0xFF;
        bytes[24..28].copy_from_slice(&rng.pick(&MXCSR).to_le_bytes());
        for number in 0..8 {
            let register = &mut bytes[32 + 16 * number..][..10];
            rng.fill(register);
            // A normal number: the integer bit is set, the exponent is in the middle.
            register[7] |= 0x80;
            register[9] = 0x3F;
        }
        rng.fill(&mut bytes[160..416]);
        bytes[LEGACY_SIZE..LEGACY_SIZE + 8].copy_from_slice(&components.to_le_bytes());
        for range in extended(components) {
            rng.fill(&mut bytes[range]);
        }
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.memory, self.layout) }
    }
}

/// Loads `before` into the registers, spins, and stores them to `after`.
fn spin(before: &Area, after: &mut Area, components: u64) {
    let (mut mxcsr, mut control): (u32, u16) = (0, 0);
    // SAFETY: both areas are as large as CPUID asks for and aligned; `before` was filled with legal
    // values. What compiled code relies on (control words, an empty x87 stack) is put back.
    unsafe {
        asm!(
            "stmxcsr [{mxcsr}]",
            "fnstcw [{control}]",
            "xrstor64 [{before}]",
            "2:",
            "dec rcx",
            "jnz 2b",
            "xsave64 [{after}]",
            "fninit",
            "fldcw [{control}]",
            "ldmxcsr [{mxcsr}]",
            mxcsr = in(reg) &raw mut mxcsr,
            control = in(reg) &raw mut control,
            before = in(reg) before.memory,
            after = in(reg) after.memory,
            inout("rcx") ROUNDS => _,
            in("eax") components as u32,
            in("edx") 0,
            clobber_abi("C"),
        );
    }
}

/// Returns the differences by name. Fields like the last instruction's address hold no pattern.
fn differences(before: &[u8], after: &[u8], components: u64) -> Vec<String> {
    let parts = [("FCW", 0..2), ("tags", 4..5), ("MXCSR", 24..28), ("x87", 32..160), ("XMM", 160..416)];
    let parts = parts.into_iter().map(|(name, range)| (name.to_owned(), range));
    let more = extended(components).map(|range| (format!("component at {}", range.start), range));
    parts
        .chain(more)
        .filter(|(_, range)| before[range.clone()] != after[range.clone()])
        .map(|(name, range)| {
            let first = range.clone().find(|&byte| before[byte] != after[byte]).unwrap_or(range.start);
            format!(
                "{name}: byte {} was {:#x} and is {:#x}",
                first - range.start,
                before[first],
                after[first]
            )
        })
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn registers_survive_a_spin_and_differences_are_named() {
        let components = usable_components().unwrap();
        let mut rng = Rng::new(1);
        let (mut before, mut after) = (Area::new().unwrap(), Area::new().unwrap());
        before.fill(&mut rng, components);
        spin(&before, &mut after, components);
        assert_eq!(differences(before.bytes(), after.bytes(), components), Vec::<String>::new());
        after.bytes()[161] ^= 1;
        let names = differences(before.bytes(), after.bytes(), components);
        assert!(names.len() == 1 && names[0].starts_with("XMM: byte 1"), "{names:?}");
    }
}
