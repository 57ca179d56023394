//! Names of processor features, as the kernel prints them, and the bits of CPUID behind them.
//!
//! A running kernel has decided from these bits which instructions it uses, and programs have, too. So a
//! host must have all of them, except those that only concern the machine's own power, sensors, counters
//! and virtualization.

use kvm_bindings::kvm_cpuid_entry2;
use mercury_image::{Leaf, Processor};

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

/// Features that programs find by themselves. The kernel has no names for most of them, and these names are
/// Intel's (Instruction Set Extensions Programming Reference, 1.5).
const PROGRAMS: [Row; 3] = [
    (
        7,
        1,
        Eax,
        "sha512 sm3 sm4 rao_int avx_vnni avx512_bf16 - cmpccxadd - - - - - - - - - - - - - amx_fp16 - \
         avx_ifma - - - - - - - movrs",
    ),
    (
        7,
        1,
        Edx,
        "- - - - avx_vnni_int8 avx_ne_convert - - amx_complex - avx_vnni_int16 - - - - user_msr - - - avx10 \
         - apx_f",
    ),
    (0x1E, 1, Eax, "- - - - amx_fp8 amx_transpose amx_tf32 amx_avx512 amx_movrs"),
];
/// Beginnings of such names, and the feature without which no program can use them.
const BASES: [(&str, &str); 5] =
    [("amx", "amx_tile"), ("avx", "avx"), ("sha512", "avx"), ("sm3", "avx"), ("sm4", "avx")];
/// Component of XSAVE with the registers of APX.
const APX: (&str, u32) = ("apx_f", 19);
/// Leaf of AVX10. Its EBX has the version, and the lengths of vectors.
const AVX10: (&str, u32) = ("avx10", 0x24);

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
pub fn missing<'a>(processor: &'a Processor, cpuid: &[kvm_cpuid_entry2]) -> Vec<&'a str> {
    let mut found = named(&processor.flags, cpuid);
    let unnamed = unnamed(processor, cpuid);
    found.extend(unnamed.into_iter().filter(|name| !processor.flags.iter().any(|flag| flag == name)));
    found
}

/// Finds features that a program of the machine may have found by itself, and that are not here.
fn unnamed(processor: &Processor, cpuid: &[kvm_cpuid_entry2]) -> Vec<&'static str> {
    let can_use = |name: &str| {
        let base = BASES.iter().find(|(begin, _)| name.starts_with(begin));
        let has_base = base.is_none_or(|(_, base)| processor.flags.iter().any(|flag| flag == base));
        has_base && (name != APX.0 || processor.xsave.iter().any(|one| one.number == APX.1))
    };
    let mut found = Vec::new();
    for (leaf, index, register, names) in PROGRAMS {
        let Some(theirs) = leaf_of(processor, leaf, index) else { continue };
        let bits = (0_u32..).zip(names.split_whitespace());
        let lost = bits.filter(|&(bit, name)| {
            let is_there = name != "-" && word(&theirs.words, register) >> bit & 1 != 0;
            is_there
                && can_use(name)
                && !(has(cpuid, leaf, index, register, bit) && is_as_good(name, processor, cpuid))
        });
        found.extend(lost.map(|(_, name)| name));
    }
    found
}

/// Compares the parts of a feature that have no bits of their own.
fn is_as_good(name: &str, processor: &Processor, cpuid: &[kvm_cpuid_entry2]) -> bool {
    const VERSION: u32 = 0xFF;
    if name != AVX10.0 {
        return true;
    }
    let theirs = leaf_of(processor, AVX10.1, 0).map_or(0, |leaf| leaf.words[1]);
    let ours =
        cpuid.iter().find(|entry| entry.function == AVX10.1 && entry.index == 0).map_or(0, |one| one.ebx);
    theirs & VERSION <= ours & VERSION && theirs & !VERSION & !ours == 0
}

fn leaf_of(processor: &Processor, function: u32, index: u32) -> Option<&Leaf> {
    processor.leaves.iter().find(|leaf| (leaf.function, leaf.index) == (function, index))
}

fn word(words: &[u32; 4], register: Register) -> u32 {
    words[register as usize]
}

/// Takes features from a leaf of CPUID that the machine does not have: a program that finds one here could
/// not go back with the machine.
pub fn hide(entry: &mut kvm_cpuid_entry2, processor: &Processor) {
    let Some(theirs) = leaf_of(processor, entry.function, entry.index) else { return };
    for (leaf, index, register, names) in ROWS.iter().chain(&PROGRAMS) {
        if (*leaf, *index) != (entry.function, entry.index) {
            continue;
        }
        let names = (0_u32..).zip(names.split_whitespace()).filter(|(_, name)| *name != "-");
        let known = names.fold(0, |known, (bit, _)| known | 1 << bit);
        let ours = match register {
            Eax => &mut entry.eax,
            Ebx => &mut entry.ebx,
            Ecx => &mut entry.ecx,
            Edx => &mut entry.edx,
        };
        *ours &= word(&theirs.words, *register) | !known;
    }
}

/// Finds features that the kernel has named, and that are not here.
fn named<'a>(flags: &'a [String], cpuid: &[kvm_cpuid_entry2]) -> Vec<&'a str> {
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
        let missing = named;
        assert_eq!(missing(&flags, &without), ["avx", "ssbd", "stibp"]);
        let with = [entry(1, 1 << 28, 1 << 26), entry(7, 0, 3 << 30 | 1 << 27)];
        assert_eq!(missing(&flags, &with), [""; 0]);
        assert_eq!(missing(&["ssbd".to_owned()], &[]), [""; 0]);
    }

    fn processor(flags: &[&str], leaves: &[Leaf]) -> Processor {
        let flags = flags.iter().copied().map(str::to_owned).collect();
        Processor { flags, leaves: leaves.to_vec(), ..Processor::default() }
    }

    fn subleaf(function: u32, index: u32, words: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = words;
        kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..kvm_cpuid_entry2::default() }
    }

    /// Names features that no kernel lists, if a program could use them.
    #[test]
    fn features_that_programs_find_by_themselves_are_compared_too() {
        let words = [1 << 23 | 1 << 21 | 1 << 4 | 1 << 12, 0, 0, 1 << 4 | 1 << 21 | 1 << 14];
        let theirs = processor(&["avx", "avx_vnni"], &[Leaf { function: 7, index: 1, words }]);
        let here = [entry(1, 1 << 28, 0)];
        // Tiles are not enabled, nor are APX's registers; the rest are hints and kernels' own.
        assert_eq!(missing(&theirs, &here), ["avx_vnni", "avx_ifma", "avx_vnni_int8"]);
        assert_eq!(missing(&theirs, &[here[0], subleaf(7, 1, words)]), [""; 0]);
        let tiles = processor(&["avx", "avx_vnni", "amx_tile"], &theirs.leaves);
        let all = [here[0], entry(7, 0, 1 << 24), subleaf(7, 1, [1 << 23 | 1 << 4, 0, 0, 1 << 4])];
        assert_eq!(missing(&tiles, &all), ["amx_fp16"]);
        assert_eq!(missing(&processor(&["avx"], &[]), &here), [""; 0], "an image of an earlier Mercury");
    }

    #[test]
    fn a_version_and_its_vectors_are_compared() {
        let theirs = |version| {
            let avx10 = Leaf { function: 7, index: 1, words: [0, 0, 0, 1 << 19] };
            processor(&["avx"], &[avx10, Leaf { function: 0x24, index: 0, words: [0, version, 0, 0] }])
        };
        let here =
            [entry(1, 1 << 28, 0), subleaf(7, 1, [0, 0, 0, 1 << 19]), subleaf(0x24, 0, [0, 0x3_0001, 0, 0])];
        assert_eq!(missing(&theirs(0x3_0001), &here), [""; 0]);
        assert_eq!(missing(&theirs(0x1_0001), &here), [""; 0]);
        assert_eq!(missing(&theirs(0x3_0002), &here), ["avx10"]);
        assert_eq!(missing(&theirs(0x7_0001), &here), ["avx10"]);
    }

    #[test]
    fn a_guest_is_shown_no_feature_that_the_machine_has_not() {
        let words = [0xF00, 0, 1 << 28, 1 << 26];
        let theirs = processor(&[], &[Leaf { function: 1, index: 0, words }]);
        // Virtualization and the hypervisor's bit are no features of programs.
        let mut first = subleaf(1, 0, [0x800, 0x55, 1 << 28 | 1 << 12 | 1 << 5 | 1 << 31, u32::MAX]);
        hide(&mut first, &theirs);
        assert_eq!((first.eax, first.ebx, first.ecx), (0x800, 0x55, 1 << 28 | 1 << 5 | 1 << 31));
        assert_eq!(first.edx & (1 << 26 | 1 << 25 | 1), 1 << 26);
        let mut other = subleaf(7, 0, [0, u32::MAX, 0, 0]);
        hide(&mut other, &theirs);
        assert_eq!(other.ebx, u32::MAX, "the image does not say what the machine had there");
    }
}
