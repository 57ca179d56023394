//! Names of processor features, as the kernel prints them, and the bits of CPUID behind them.
//!
//! A running kernel has decided from these bits which instructions it uses, and programs have, too. So a
//! host must have all of them, except those that only concern the machine's own power, sensors, counters
//! and virtualization.

use kvm_bindings::kvm_cpuid_entry2;

/// A register of a leaf of CPUID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}
use Register::{Eax, Ebx, Ecx, Edx};

/// Leaf, index, register, and the names of its bits from bit 0 on; `-` for a bit without a name, or of a
/// feature that a machine can lose.
type Row = (u32, u32, Register, &'static str);

const ROWS: [Row; 10] = [
    (
        1,
        0,
        Edx,
        "fpu vme de pse tsc msr pae mce cx8 apic - sep mtrr pge mca cmov pat pse36 - clflush - - - mmx fxsr \
         sse sse2 ss",
    ),
    (
        1,
        0,
        Ecx,
        "pni pclmulqdq - - - - - - - ssse3 - - fma cx16 - - - pcid - sse4_1 sse4_2 x2apic movbe popcnt \
         tsc_deadline_timer aes xsave - avx f16c rdrand",
    ),
    (
        7,
        0,
        Ebx,
        "fsgsbase tsc_adjust - bmi1 hle avx2 - smep bmi2 erms invpcid rtm - - mpx - avx512f avx512dq rdseed \
         adx smap avx512ifma - clflushopt clwb - avx512pf avx512er avx512cd sha_ni avx512bw avx512vl",
    ),
    (
        7,
        0,
        Ecx,
        "- avx512vbmi umip pku - waitpkg avx512_vbmi2 - gfni vaes vpclmulqdq avx512_vnni avx512_bitalg - \
         avx512_vpopcntdq - - - - - - - rdpid - bus_lock_detect cldemote - movdiri movdir64b",
    ),
    (
        7,
        0,
        Edx,
        "- - avx512_4vnniw avx512_4fmaps fsrm - - - avx512_vp2intersect - - - - - serialize - tsxldtrk - - - \
         ibt - amx_bf16 avx512_fp16 amx_tile amx_int8",
    ),
    (7, 1, Eax, "- - - - avx_vnni avx512_bf16"),
    (0xD, 1, Eax, "xsaveopt xsavec xgetbv1 xsaves"),
    (
        0x8000_0001,
        0,
        Edx,
        "- - - - - - - - - - - syscall - - - - - - - - nx - mmxext - - fxsr_opt pdpe1gb rdtscp - lm 3dnowext \
         3dnow",
    ),
    (
        0x8000_0001,
        0,
        Ecx,
        "lahf_lm - - - cr8_legacy abm sse4a misalignsse 3dnowprefetch - - xop - - - - fma4 - - - - tbm",
    ),
    (0x8000_0008, 0, Ebx, "clzero - xsaveerptr - rdpru - - - - wbnoinvd"),
];

/// Leaf, register and bit.
type Bit = (u32, Register, u32);

/// Features that both vendors have, each with a bit of its own.
const EITHER: [(&str, [Bit; 2]); 4] = [
    ("ibrs", [(7, Edx, 26), (0x8000_0008, Ebx, 14)]),
    ("ibpb", [(7, Edx, 26), (0x8000_0008, Ebx, 12)]),
    ("stibp", [(7, Edx, 27), (0x8000_0008, Ebx, 15)]),
    ("ssbd", [(7, Edx, 31), (0x8000_0008, Ebx, 24)]),
];

fn has(cpuid: &[kvm_cpuid_entry2], leaf: u32, index: u32, register: Register, bit: u32) -> bool {
    let entry = cpuid.iter().find(|entry| entry.function == leaf && entry.index == index);
    entry.is_some_and(|entry| {
        let value = match register {
            Eax => entry.eax,
            Ebx => entry.ebx,
            Ecx => entry.ecx,
            Edx => entry.edx,
        };
        value >> bit & 1 != 0
    })
}

/// Returns the features of a machine that a guest would lose here, by their names.
#[must_use]
pub fn missing<'a>(flags: &'a [String], cpuid: &[kvm_cpuid_entry2]) -> Vec<&'a str> {
    // Without these two, an AMD kernel has its “ssbd” from a register of family 23 that CPUID does not show.
    // A guest's kernel that writes there reports so in its log, and goes on.
    let has_control = flags.iter().any(|flag| ["ibrs", "stibp"].contains(&flag.as_str()));
    let is_missing = |flag: &&str| {
        if *flag == "ssbd" && !has_control {
            return false;
        }
        if let Some((_, bits)) = EITHER.iter().find(|(name, _)| name == flag) {
            return !bits.iter().any(|&(leaf, register, bit)| has(cpuid, leaf, 0, register, bit));
        }
        ROWS.iter().any(|&(leaf, index, register, names)| {
            let bit = names.split_whitespace().position(|name| name == *flag);
            bit.is_some_and(|bit| !has(cpuid, leaf, index, register, bit as u32))
        })
    };
    flags.iter().map(String::as_str).filter(is_missing).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, ecx: u32, edx: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, ecx, edx, ..kvm_cpuid_entry2::default() }
    }

    #[test]
    fn bits_have_the_names_of_the_kernel() {
        let place = |flag: &str| {
            ROWS.iter().find_map(|&(leaf, _, register, names)| {
                names.split_whitespace().position(|name| name == flag).map(|bit| (leaf, register, bit))
            })
        };
        for (flag, expected) in [
            ("sse2", (1, Edx, 26)),
            ("rdrand", (1, Ecx, 30)),
            ("avx512vl", (7, Ebx, 31)),
            ("smap", (7, Ebx, 20)),
            ("rdpid", (7, Ecx, 22)),
            ("movdir64b", (7, Ecx, 28)),
            ("amx_int8", (7, Edx, 25)),
            ("ibt", (7, Edx, 20)),
            ("3dnow", (0x8000_0001, Edx, 31)),
            ("nx", (0x8000_0001, Edx, 20)),
            ("tbm", (0x8000_0001, Ecx, 21)),
            ("wbnoinvd", (0x8000_0008, Ebx, 9)),
        ] {
            assert_eq!(place(flag), Some(expected), "{flag}");
        }
        assert!(ROWS.iter().all(|(.., names)| names.split_whitespace().count() <= 32));
    }

    #[test]
    fn features_that_programs_may_use_are_missing_and_the_machine_s_own_are_not() {
        let flags: Vec<String> =
            ["sse2", "avx", "svm", "rep_good", "ssbd", "stibp", "aperfmperf"].map(str::to_owned).to_vec();
        let without = [entry(1, 0, 1 << 26)];
        assert_eq!(missing(&flags, &without), ["avx", "ssbd", "stibp"]);
        let with = [entry(1, 1 << 28, 1 << 26), entry(7, 0, 3 << 30 | 1 << 27)];
        assert_eq!(missing(&flags, &with), [""; 0]);
        assert_eq!(missing(&["ssbd".to_owned()], &[]), [""; 0]);
    }
}
