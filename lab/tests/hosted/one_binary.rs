//! One kernel, linked once, that boots a bare machine and runs as a process.

use mercury_lab::{Platform, Spec, Vendor, hash::Ingredients, previrtualization::kernel_of};

use super::*;

/// Types of segments.
const LOADED: u32 = 1;
const NOTES: u32 = 4;

fn number<const BYTES: usize>(bytes: &[u8], at: usize) -> usize {
    let mut wide = [0; 8];
    wide[..BYTES].copy_from_slice(&bytes[at..at + BYTES]);
    usize::from_le_bytes(wide)
}

/// Returns an ELF file's segments of a type: the place of each in memory, and its contents.
fn segments(elf: &[u8], kind: u32) -> Vec<(usize, &[u8])> {
    assert!(elf.starts_with(b"\x7fELF\x02\x01"));
    let (first, size, count) = (number::<8>(elf, 32), number::<2>(elf, 54), number::<2>(elf, 56));
    let headers = (0..count).map(|index| &elf[first + index * size..]);
    let of_this_kind = headers.filter(|header| number::<4>(header, 0) == kind as usize);
    of_this_kind
        .map(|header| {
            let offset = number::<8>(header, 8);
            (number::<8>(header, 16), &elf[offset..offset + number::<8>(header, 32)])
        })
        .collect()
}

/// Unpacks the kernel in a boot image (Documentation/arch/x86/boot.rst).
fn payload(image: &[u8]) -> Vec<u8> {
    const SETUP_SECTORS: usize = 0x1F1;
    const OFFSET: usize = 0x248;
    const LENGTH: usize = 0x24C;
    let begin = (number::<1>(image, SETUP_SECTORS) + 1) * 512 + number::<4>(image, OFFSET);
    let packed = image[begin..begin + number::<4>(image, LENGTH)].to_vec();
    let mut unpack = Command::new("gzip");
    unpack.args(["-dc"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut unpack = unpack.spawn().expect("gzip");
    let mut input = unpack.stdin.take().expect("its input");
    // The length follows the kernel, at which gzip complains.
    let writer = thread::spawn(move || input.write_all(&packed));
    let unpacked = unpack.wait_with_output().expect("the kernel").stdout;
    let _ = writer.join().expect("all written");
    unpacked
}

/// The command that prints a kernel's identity (`/sys/kernel/notes`), a hash that the linker has
/// made of it.
const IDENTITY: &str = "uname -r; od -An -v -tx1 /sys/kernel/notes | tr -d ' \\n'; echo";

/// Boots a bare machine and runs as a process with the same kernel. The loaded parts of the boot
/// image equal the hosted `vmlinux`, byte for byte. Both come up to user space, and have the same
/// identity.
#[test]
#[ignore = "long"]
fn the_same_kernel_boots_a_bare_machine_and_is_a_process() -> Result<()> {
    Platform::need(Vendor::Amd, "this is about a kernel on any bare machine")?;
    let release = Release::Bookworm;
    let built = previrtualization::build(release, Flavour::PreVirtualized)?;
    let read = |path: &Path| fs::read(path).expect("the kernel");
    let (vmlinux, image) = (read(&built.vmlinux), read(&built.image));
    let inside = payload(&image);
    let loaded = segments(&vmlinux, LOADED);
    assert!(loaded.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() > 4 << 20);
    assert!(loaded == segments(&inside, LOADED), "the boot image has another kernel");
    let notes: Vec<String> =
        segments(&vmlinux, NOTES)[0].1.iter().map(|byte| format!("{byte:02x}")).collect();
    let place = Place::with("one", &built)?;
    assert!(read(&place.kernel) == vmlinux, "what is hosted is another file");
    let bare = mercury_lab::Machine::boot(Spec::new(kernel_of(release)).cpus(2).own_kernel(&built.image))?;
    let there = bare.sh(IDENTITY)?;
    let version = bare.sh("cat /proc/version")?;
    bare.shut_down()?;
    let disk = place.root_disk(&Image::ensure(release)?)?;
    let mut machine = shell_on_disk(&place, &disk, &[]);
    machine.type_line(&format!("echo be''gin; {IDENTITY}; cat /proc/version; echo e''nd"));
    machine.wait_for("end\n");
    machine.type_line("mount -o remount,ro /dev/vda /; poweroff -f");
    let log = machine.end(HALTED);
    assert_well(&log);
    let here = between(&log, "begin\n", "end\n");
    assert_eq!(here.trim(), format!("{}\n{}", there.trim(), version.trim()));
    assert!(there.contains("-mercury-small\n") && there.contains(&notes.concat()), "{there}: {notes:?}");
    let name = |bytes: &[u8]| Ingredients::default().with(bytes).name();
    println!("vmlinux {} in bzImage {}, on both: {}", name(&vmlinux), name(&image), here.trim());
    Ok(())
}
