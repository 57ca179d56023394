//! The microcode that a restore environment brings: the early archive of this system's initial RAM disk
//! may have been renewed since this system started.
//!
//! The kernel may decline what the archive has: by `dis_ucode_ldr`, as a guest of a hypervisor, or because a
//! list in the kernel does not know the patch. What it declined at this start it declines in the environment.
//!
//! The formats are Intel's (SDM volume 3, "Microcode Update Facilities") and AMD's container, as Linux
//! reads them in arch/x86/kernel/cpu/microcode.

use super::environment;
use mercury_control::sysroot::Sysroot;
use mercury_image::Processor;
use mercury_quiesce::{describe, patient};
use std::{fs, ops::Range, os::unix::fs::MetadataExt};

const INTEL: &[u8] = b"kernel/x86/microcode/GenuineIntel.bin";
const AMD: &[u8] = b"kernel/x86/microcode/AuthenticAMD.bin";
const TRAILER: &[u8] = b"TRAILER!!!";
/// Bit of /proc/sys/kernel/tainted that loading microcode into a running kernel sets
/// (`TAINT_CPU_OUT_OF_SPEC`). So does each write to /dev/cpu/*/msr.
const LOADED_LATE: u64 = 1 << 2;
/// File by which microcode is loaded into a running kernel. It exists only if the kernel can do so
/// (`CONFIG_MICROCODE_LATE_LOADING`).
const RELOAD: &str = "sys/devices/system/cpu/microcode/reload";
/// Limit on tables and patches, which no vendor comes near.
const COUNT_MAX: usize = 1 << 16;

/// Predicts it for this machine and the restore environment that it would make.
///
/// # Errors
///
/// Fails as [`predict`] does.
pub fn predict_in(sysroot: &Sysroot) -> Result<(), String> {
    let cpuinfo = sysroot.text("proc/cpuinfo").unwrap_or_default();
    predict(&describe::processor(&cpuinfo), &environment::early_microcode(sysroot), sysroot)
}

/// Predicts the microcode's revision in a restore environment that brings the early archive `early`.
///
/// # Errors
///
/// Returns the reason, as a clause, if it would be another one than the image's.
pub fn predict(running: &Processor, early: &[u8], sysroot: &Sysroot) -> Result<(), String> {
    let Some(now) = number(&running.microcode) else { return Ok(()) };
    if loads_none(running, sysroot) {
        return Ok(());
    }
    let ram_disk = environment::initial_ram_disk(sysroot);
    if began_with_ram_disk(sysroot)
        && let Err(error) = patient::read_within(&sysroot.path(&ram_disk), 1)
    {
        return Err(format!(
            "this system may have its microcode from an initial RAM disk, and /{ram_disk} cannot be read \
             ({error})"
        ));
    }
    let [family, model, stepping] = running.signature;
    let signature = signature(family, model, stepping);
    let flags = sysroot.text("sys/devices/system/cpu/cpu0/microcode/processor_flags");
    let flags = flags.as_deref().and_then(number).unwrap_or(0);
    let brought = match running.vendor.as_str() {
        "GenuineIntel" => file(early, INTEL).and_then(|file| intel(file, signature, flags)),
        "AuthenticAMD" => file(early, AMD).and_then(|file| amd(file, signature)),
        _ => None,
    };
    match brought {
        // The kernel loads only what is newer. It has declined an archive that it has seen.
        Some(brought) if brought > now && is_renewed(sysroot) => Err(format!(
            "the microcode would be {brought:#x}, which the initial RAM disk in /boot has since this system \
             started, and the image's {now:#x}"
        )),
        Some(brought) if brought == now => Ok(()),
        // The firmware may have brought it, as it will again. Microcode that came late is forgotten.
        _ if may_be_late(sysroot) => Err(format!(
            "the microcode {now:#x} was loaded into the running kernel, and a restart forgets it"
        )),
        _ => Ok(()),
    }
}

/// Returns true if the kernel loads no microcode, neither now nor in the restore environment, which has the
/// same words on its command line.
fn loads_none(running: &Processor, sysroot: &Sysroot) -> bool {
    const WORD: &str = "dis_ucode_ldr";
    let line = sysroot.text("proc/cmdline").unwrap_or_default();
    let says_so = |word: &str| {
        let listed =
            word.strip_prefix("microcode=").is_some_and(|list| list.split(',').any(|one| one == WORD));
        word == WORD || listed
    };
    running.flags.iter().any(|flag| flag == "hypervisor") || line.split_whitespace().any(says_so)
}

/// Returns true if a boot loader gave this system an initial RAM disk, or if that is not known.
fn began_with_ram_disk(sysroot: &Sysroot) -> bool {
    /// `hdr.ramdisk_size` and `ext_ramdisk_size` of `struct boot_params` (Documentation/arch/x86/boot.rst,
    /// zero-page.rst).
    const SIZES: [usize; 2] = [0x21C, 0x0C4];
    let boot_params = sysroot.bytes("sys/kernel/boot_params/data").unwrap_or_default();
    SIZES.iter().any(|at| word(&boot_params, *at) != Some(0))
}

/// Returns true if the initial RAM disk may have been written since this system started.
fn is_renewed(sysroot: &Sysroot) -> bool {
    let stat = sysroot.text("proc/stat").unwrap_or_default();
    let started = stat.lines().find_map(|line| line.strip_prefix("btime ")?.parse::<i64>().ok());
    // A file that is copied or renamed into its place may keep its time of modification.
    let written = fs::metadata(sysroot.path(&environment::initial_ram_disk(sysroot)))
        .map(|found| found.mtime().max(found.ctime()));
    written.ok().zip(started).is_none_or(|(written, started)| written >= started)
}

/// Returns true if microcode may have been loaded into the running kernel.
fn may_be_late(sysroot: &Sysroot) -> bool {
    let tainted = sysroot.text("proc/sys/kernel/tainted").and_then(|text| text.parse::<u64>().ok());
    sysroot.exists(RELOAD) && tainted.is_some_and(|bits| bits & LOADED_LATE != 0)
}

fn number(text: &str) -> Option<u32> {
    u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
}

/// Encodes a signature as CPUID leaf 1 shows it.
fn signature(family: u32, model: u32, stepping: u32) -> u32 {
    let base = family.min(15);
    stepping & 0xF | (model & 0xF) << 4 | base << 8 | (model >> 4 & 0xF) << 16 | (family - base) << 20
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn part(bytes: &[u8], at: usize, length: usize) -> Option<&[u8]> {
    bytes.get(at..at.checked_add(length)?)
}

/// Finds a file in archives that are not compressed (cpio, "newc"), one after the other as the kernel reads
/// them.
fn file<'a>(archive: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    let mut at = 0;
    loop {
        let Entry { name, data, next, .. } = Entry::read(archive, at)?;
        if name == wanted {
            return archive.get(data);
        }
        at = next;
    }
}

/// A file of such an archive.
pub(super) struct Entry<'a> {
    pub(super) name: &'a [u8],
    /// Place of the data.
    pub(super) data: Range<usize>,
    /// Place of the next entry: after the last one, that of the next archive.
    pub(super) next: usize,
    /// True if the archive ends with this entry.
    pub(super) is_last: bool,
}

impl<'a> Entry<'a> {
    /// Reads the entry at `at`; `None` if there is none, or the archive is torn.
    pub(super) fn read(archive: &'a [u8], at: usize) -> Option<Self> {
        const HEADER: usize = 110;
        let header = part(archive, at, HEADER)?;
        let number = |at: usize| {
            let digits = std::str::from_utf8(header.get(at..at + 8)?).ok()?;
            usize::from_str_radix(digits, 16).ok()
        };
        if !header.starts_with(b"070701") {
            return None;
        }
        let (size, name_size) = (number(54)?, number(94)?);
        let name = part(archive, at + HEADER, name_size.checked_sub(1)?)?;
        let start = (at + HEADER + name_size).next_multiple_of(4);
        let end = start.checked_add(size)?;
        let (next, is_last) = (end.checked_next_multiple_of(4)?, name == TRAILER);
        // Zeros pad up to the next archive.
        let padding = archive.get(next..).filter(|_| is_last).unwrap_or_default();
        let zeros = padding.iter().take_while(|byte| **byte == 0).count();
        Some(Self { name, data: start..end, next: next + zeros, is_last })
    }
}

/// Returns the newest revision for a signature and one of these platforms, in Intel's file.
fn intel(mut file: &[u8], signature: u32, platforms: u32) -> Option<u32> {
    const HEADER: usize = 48;
    /// Length of an update whose header says 0, with its header.
    const DEFAULT: (usize, usize) = (2000, 2048);
    const TABLE: usize = 20;
    const ENTRY: usize = 12;
    let is_ours = |update: &[u8], at: usize| {
        let (of, on) = (word(update, at), word(update, at + 4));
        // A processor without platforms has 0 in both.
        of == Some(signature) && on.is_some_and(|on| on & platforms != 0 || (on == 0 && platforms == 0))
    };
    let mut newest = None;
    while let (Some(data), Some(total)) = (word(file, 28), word(file, 32)) {
        let (data, total) = if data == 0 { DEFAULT } else { (data as usize, total as usize) };
        let Some(update) = part(file, 0, total).filter(|_| total >= HEADER) else { break };
        let table = data.saturating_add(HEADER);
        let count = word(update, table).map_or(0, |count| count as usize).min(COUNT_MAX);
        let others = (0..count).map(|index| table + TABLE + index * ENTRY);
        // The signature is at 12, and the platforms' flags at 24.
        let is_main = word(update, 12) == Some(signature)
            && word(update, 24).is_some_and(|on| on & platforms != 0 || (on == 0 && platforms == 0));
        if is_main || others.into_iter().any(|at| is_ours(update, at)) {
            newest = newest.max(word(update, 4));
        }
        file = &file[total..];
    }
    newest
}

/// Returns the newest revision for a signature, in AMD's containers.
fn amd(mut file: &[u8], signature: u32) -> Option<u32> {
    const MAGIC: u32 = 0x0041_4D44;
    const SECTION: usize = 8;
    const TABLE: u32 = 0;
    const PATCH: u32 = 1;
    const ENTRY: usize = 16;
    let (mut newest, mut equivalent) = (None, None);
    loop {
        if word(file, 0) == Some(MAGIC) {
            // A container begins with the table of processors that share patches.
            equivalent = None;
            file = file.get(4..)?;
        }
        let (Some(kind), Some(length)) = (word(file, 0), word(file, 4)) else { break };
        let Some(section) = part(file, SECTION, length as usize) else { break };
        match kind {
            TABLE => {
                let same = |entry: &&[u8]| word(entry, 0) == Some(signature);
                equivalent = section.chunks_exact(ENTRY).find(same).and_then(|entry| half(entry, 12));
            }
            PATCH if equivalent.is_some() && half(section, 24) == equivalent => {
                newest = newest.max(word(section, 4));
            }
            PATCH => {}
            _ => break,
        }
        file = &file[SECTION + length as usize..];
    }
    newest
}

#[cfg(test)]
mod tests {
    use super::*;
    use mercury_initramfs::Archive;
    use proptest::prelude::*;

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// An update of Intel's, with a second signature if one is given.
    fn update(revision: u32, signature: u32, platforms: u32, other: Option<(u32, u32)>) -> Vec<u8> {
        let table = other.map_or(0, |_| 32);
        let mut bytes =
            words(&[1, revision, 0, signature, 0, 1, platforms, 16, 48 + 16 + table, 0, 0, 0, 7, 7, 7, 7]);
        if let Some((signature, platforms)) = other {
            bytes.extend(words(&[1, 0, 0, 0, 0, signature, platforms, 0]));
        }
        bytes
    }

    /// A container of AMD's with one processor and one patch.
    fn container(signature: u32, equivalent: u32, patched: u32, revision: u32) -> Vec<u8> {
        let table = words(&[signature, 0, 0, equivalent, 0, 0, 0, 0]);
        let patch = words(&[0, revision, 0, 0, 0, 0, patched, 0]);
        let section = |kind, bytes: Vec<u8>| [words(&[kind, bytes.len() as u32]), bytes].concat();
        [words(&[0x0041_4D44]), section(0, table), section(1, patch)].concat()
    }

    fn early(name: &[u8], data: &[u8]) -> Vec<u8> {
        let mut archive = Archive::default();
        archive.file("kernel/x86/microcode/.enuineIntel.align.0123456789abc", b"");
        archive.file(std::str::from_utf8(name).expect("a name"), data);
        archive.finish()
    }

    /// A machine with this kernel taint and Intel's platform 1. Its initial RAM disk was renewed after it
    /// started, and its kernel loads microcode late.
    fn machine(tainted: &str) -> (tempfile::TempDir, Sysroot) {
        let root = tempfile::tempdir().expect("a folder");
        let sysroot = Sysroot::at(root.path());
        put(&sysroot, "sys/devices/system/cpu/cpu0/microcode/processor_flags", "0x2\n");
        put(&sysroot, "proc/sys/kernel/tainted", tainted);
        put(&sysroot, "proc/sys/kernel/osrelease", "6.1\n");
        put(&sysroot, "proc/stat", "cpu 1 2\nbtime 1000\nprocesses 1\n");
        put(&sysroot, "boot/initrd.img-6.1", "");
        put(&sysroot, RELOAD, "");
        (root, sysroot)
    }

    fn put(sysroot: &Sysroot, path: &str, text: &str) {
        let path = sysroot.path(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
        fs::write(path, text).expect("a file");
    }

    fn processor(vendor: &str, signature: [u32; 3]) -> Processor {
        Processor { vendor: vendor.into(), signature, microcode: "0x20".into(), ..Processor::default() }
    }

    #[test]
    fn signatures_are_cpuid_s() {
        assert_eq!(signature(6, 0x9E, 9), 0x0009_06E9);
        assert_eq!(signature(25, 1, 1), 0x00A0_0F11);
        assert_eq!(signature(15, 0x41, 2), 0x0004_0F12);
    }

    #[test]
    fn intel_s_updates_are_told_apart() {
        let ours = 0x0009_06E9;
        let file = [
            update(0x30, 0x0001_0000, 2, None),
            update(0x21, ours, 2, None),
            update(0x40, ours, 1, None),
            update(0x22, 0x0001_0000, 2, Some((ours, 6))),
        ]
        .concat();
        assert_eq!(intel(&file, ours, 2), Some(0x22));
        assert_eq!(intel(&file, ours, 1), Some(0x40));
        assert_eq!(intel(&file, ours, 8), None);
        assert_eq!(intel(&file[..200], ours, 2), Some(0x21), "the last is torn");
    }

    #[test]
    fn amd_s_containers_are_told_apart() {
        let ours = 0x00A0_0F11;
        let file =
            [container(0x0080_0F11, 0x8011, 0x8011, 0x50), container(ours, 0xA011, 0xA011, 0x22)].concat();
        assert_eq!(amd(&file, ours), Some(0x22));
        assert_eq!(amd(&file, 0x0080_0F11), Some(0x50));
        assert_eq!(amd(&file, 0x0080_0F12), None);
        assert_eq!(amd(&container(ours, 0xA011, 0xA012, 0x22), ours), None, "a patch for another");
    }

    /// An environment without the microcode would refuse the image.
    #[test]
    fn a_ram_disk_that_is_gone_is_told() {
        let (_root, sysroot) = machine("0\n");
        let intel = processor("GenuineIntel", [6, 0x9E, 9]);
        let guest = Processor { flags: vec!["hypervisor".into()], ..intel.clone() };
        fs::remove_file(sysroot.path("boot/initrd.img-6.1")).expect("gone");
        let began_with = |at: Option<usize>| {
            let mut boot_params = vec![0; 4096];
            at.into_iter().for_each(|at| boot_params[at] = 1);
            put(&sysroot, "sys/kernel/boot_params/data", std::str::from_utf8(&boot_params).expect("text"));
        };
        let why = predict(&intel, b"", &sysroot).expect_err("nothing is known");
        assert!(why.contains("/boot/initrd.img-6.1 cannot be read"), "{why}");
        for at in [0x21C, 0x0C4] {
            began_with(Some(at));
            assert!(predict(&intel, b"", &sysroot).is_err(), "{at:#x}");
        }
        assert_eq!(predict(&guest, b"", &sysroot), Ok(()), "it loads none");
        began_with(None);
        assert_eq!(predict(&intel, b"", &sysroot), Ok(()));
    }

    #[test]
    fn another_revision_after_the_restart_is_told() {
        let (_root, fine) = machine("0\n");
        let (_root, late) = machine("4\n");
        let intel = processor("GenuineIntel", [6, 0x9E, 9]);
        let amd = processor("AuthenticAMD", [25, 1, 1]);
        let with = |revision| {
            [
                (&intel, early(INTEL, &update(revision, 0x0009_06E9, 2, None))),
                (&amd, early(AMD, &container(0x00A0_0F11, 0xA011, 0xA011, revision))),
            ]
        };
        for (processor, archive) in with(0x20) {
            assert_eq!(predict(processor, &archive, &fine), Ok(()));
            assert_eq!(predict(processor, &archive, &late), Ok(()), "the archive has it, too");
        }
        for (processor, archive) in with(0x21) {
            let why = predict(processor, &archive, &fine).expect_err("newer");
            assert!(why.starts_with("the microcode would be 0x21, which"), "{why}");
        }
        for (processor, archive) in with(0x19) {
            assert_eq!(predict(processor, &archive, &fine), Ok(()), "the firmware's");
            let why = predict(processor, &archive, &late).expect_err("it came late");
            assert!(why.starts_with("the microcode 0x20 was loaded into the running kernel"), "{why}");
        }
        assert_eq!(predict(&intel, b"", &fine), Ok(()));
        assert!(predict(&intel, b"", &late).is_err());
        assert_eq!(predict(&Processor::default(), b"", &late), Ok(()), "a processor without microcode");
    }

    /// Writes to MSRs set the same bit, and Debian's kernels load no microcode late.
    #[test]
    fn a_taint_is_no_late_load_where_there_is_none() {
        let (_root, sysroot) = machine("4\n");
        let intel = processor("GenuineIntel", [6, 0x9E, 9]);
        assert!(predict(&intel, b"", &sysroot).is_err());
        fs::remove_file(sysroot.path(RELOAD)).expect("gone");
        assert_eq!(predict(&intel, b"", &sysroot), Ok(()));
    }

    #[test]
    fn what_the_kernel_declined_it_declines_again() {
        let archive = early(AMD, &container(0x00A0_0F11, 0xA011, 0xA011, 0x21));
        let amd = processor("AuthenticAMD", [25, 1, 1]);
        let (_root, sysroot) = machine("0\n");
        let is_fine = || predict(&amd, &archive, &sysroot).is_ok();
        assert!(!is_fine(), "it came after the start");
        put(&sysroot, "proc/stat", "cpu 1 2\nbtime 99999999999\n");
        assert!(is_fine(), "the kernel has seen it");
        fs::remove_file(sysroot.path("proc/stat")).expect("gone");
        assert!(!is_fine(), "it is unknown when the system started");
        for (line, expected) in [
            ("quiet dis_ucode_ldr", true),
            ("microcode=force_minrev,dis_ucode_ldr", true),
            ("quiet x.dis_ucode_ldr=1", false),
        ] {
            put(&sysroot, "proc/cmdline", line);
            assert_eq!(is_fine(), expected, "{line}");
        }
        let guest = Processor { flags: vec!["fpu".into(), "hypervisor".into()], ..amd.clone() };
        assert_eq!(predict(&guest, &archive, &sysroot), Ok(()));
    }

    /// Debian's initramfs-tools puts one archive for each package in front.
    #[test]
    fn the_second_archive_is_read() {
        let mut both = early(AMD, &container(0x00A0_0F11, 0xA011, 0xA011, 0x21));
        both.resize(both.len().next_multiple_of(512), 0);
        both.extend(early(INTEL, &update(0x21, 0x0009_06E9, 2, None)));
        let (_root, sysroot) = machine("0\n");
        let why = predict(&processor("GenuineIntel", [6, 0x9E, 9]), &both, &sysroot).expect_err("newer");
        assert!(why.starts_with("the microcode would be 0x21"), "{why}");
    }

    proptest! {
        /// Any bytes are read without a fault.
        #[test]
        fn any_archive_is_survived(
            bytes in proptest::collection::vec(any::<u8>(), 0..600),
            cut in 0_usize..600,
        ) {
            let _ = (intel(&bytes, 0, 0), amd(&bytes, 0), file(&bytes, INTEL));
            let mut known = early(INTEL, &update(1, 2, 3, Some((4, 5))));
            known.truncate(cut.min(known.len()));
            let _ = file(&known, INTEL).map(|file| intel(file, 4, 5));
            let mut container = [words(&[0x0041_4D44]), bytes].concat();
            let _ = amd(&container, 0);
            container.splice(4..4, words(&[1, 40]));
            let _ = amd(&container, 0);
        }
    }
}
