//! Memory that guests of one image share: the image's memory in a file, unpacked once. Each guest maps it
//! privately, so that a page exists once on the host until a guest writes to it.

use crate::{
    acpi::Firmware,
    image::{self, Image},
    layout::{Layout, MONITOR},
    memory,
};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
};
use mercury_devices::memory::{View, read};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

/// Bytes that are copied at once.
const BLOCK: usize = 64 << 10;
/// First words of the text at the file's end.
const KIND: &str = "memory of a Mercury image, version 1";

/// Maps the memory of an image from its file, which is made if it is not there.
///
/// # Errors
/// The file cannot be made, or has the memory of another image. Or the image is damaged.
pub fn map<R: Read>(path: &Path, image: &mut Image<R>, firmware: &Firmware, layout: &Layout) -> Result<View> {
    let (bytes, text) = (memory_bytes(layout), text(image, layout));
    if !path.exists() {
        unpack(path, &text, image, firmware, layout)?;
    }
    let file = File::open(path).map_err(|error| failed(path, &error))?;
    let metadata = file.metadata().map_err(|error| failed(path, &error))?;
    if !is_own(metadata.uid(), metadata.mode()) {
        let text = format!("{} belongs to another user, or others may write to it", path.display());
        return Err(Error::new(Exit::Impossible, text)
            .hint("whoever writes there changes the guest: remove the file, or choose another name"));
    }
    let mut found = vec![0; text.len()];
    let whole = bytes + text.len() as u64;
    let is_whole = file.metadata().is_ok_and(|found| found.len() == whole);
    let is_read = is_whole && file.read_exact_at(&mut found, bytes).is_ok();
    if !is_read || found != text.as_bytes() {
        let text = format!("{} has not the memory of this image", path.display());
        return Err(Error::new(Exit::Impossible, text)
            .hint("give each image a memory file of its own; it is made if it is not there"));
    }
    memory::map_file(layout, &Arc::new(file))
}

/// Returns true if a file is this user's or root's, and nobody else may write to it.
fn is_own(owner: u32, mode: u32) -> bool {
    // SAFETY: It only asks the kernel for a number.
    let own = unsafe { libc::geteuid() };
    [0, own].contains(&owner) && mode & 0o022 == 0
}

/// Writes the memory to a new file, which gets its name when it is whole.
fn unpack<R: Read>(
    path: &Path,
    text: &str,
    image: &mut Image<R>,
    firmware: &Firmware,
    layout: &Layout,
) -> Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", std::process::id()));
    let new = PathBuf::from(name);
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o400).open(&new);
    let file = file.map_err(|error| failed(&new, &error))?;
    let filled = fill(&file, text, image, firmware, layout)
        .and_then(|()| fs::rename(&new, path).map_err(|error| failed(path, &error)));
    if filled.is_err() {
        let _ = fs::remove_file(&new);
    }
    filled
}

fn fill<R: Read>(
    file: &File,
    text: &str,
    image: &mut Image<R>,
    firmware: &Firmware,
    layout: &Layout,
) -> Result<()> {
    let view = memory::map(layout)?;
    image::load_firmware(firmware, &view)?;
    image.load(&view)?;
    let wrong = |error: io::Error| {
        Error::new(Exit::Failed, format!("cannot write the memory file: {error}"))
            .hint("make room in the folder of the memory file, for all of the machine's memory")
    };
    let mut block = vec![0; BLOCK];
    let mut at = 0;
    for (start, bytes) in memory::ranges(layout) {
        for offset in (0..bytes).step_by(BLOCK) {
            let block = &mut block[..BLOCK.min(bytes - offset)];
            let read = read(&view, start.0 + offset as u64, block);
            read.ok_or_else(|| wrong(io::ErrorKind::UnexpectedEof.into()))?;
            // What is not written reads as zeros.
            if block.iter().any(|byte| *byte != 0) {
                file.write_all_at(block, at + offset as u64).map_err(wrong)?;
            }
        }
        at += bytes as u64;
    }
    file.write_all_at(text.as_bytes(), at).and_then(|()| file.sync_all()).map_err(wrong)
}

/// Returns the size of the memory in the file: the machine's and the monitor's.
fn memory_bytes(layout: &Layout) -> u64 {
    layout.bytes() + (MONITOR.end - MONITOR.start)
}

/// Returns the text by which a file is known.
fn text<R: Read>(image: &Image<R>, layout: &Layout) -> String {
    format!("{KIND}\n{:x?}\n{:x?}\n", image.identity(), layout.ranges())
}

fn failed(path: &Path, error: &io::Error) -> Error {
    Error::new(Exit::Failed, format!("cannot use {} as the memory file: {error}", path.display()))
        .hint("choose a folder where you may write, with room for the machine's memory")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::image::tests::{frames, image, machine};
    use mercury_devices::memory::{pointer, write};
    use mercury_image::PAGE;

    fn map_again(path: &Path, bytes: &[u8]) -> Result<View> {
        let mut image = Image::read(bytes)?;
        let layout = Layout::of(image.machine())?;
        let firmware = image::firmware(image.machine())?;
        map(path, &mut image, &firmware, &layout)
    }

    fn whole() -> Vec<u8> {
        image(&machine(), frames(), [[1; PAGE], [2; PAGE]].concat())
    }

    fn byte(view: &View, at: u64) -> u8 {
        let mut one = [0];
        read(view, at, &mut one).unwrap();
        one[0]
    }

    /// Returns the proportional share that this process has of the mapping at an address, in KiB.
    fn share(view: &View, at: u64) -> u64 {
        let start = format!("{:x}-", pointer(view, at, 1).unwrap().addr());
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
        let line = lines.find(|line| line.starts_with("Pss:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn guests_share_what_they_have_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let (path, bytes) = (folder.path().join("memory"), whole());
        let first = map_again(&path, &bytes).unwrap();
        let before = fs::read(&path).unwrap();
        let second = map_again(&path, &bytes).unwrap();
        let pages = [0x10_0000, 0x10_1000, 0x1000, 0x2000, 0x3000, 0x10_2000];
        for view in [&first, &second] {
            assert_eq!(pages.map(|at| byte(view, at)), [1, 1, 9, 0, 2, 0]);
        }
        let range = |view: &View| (0..16_u64).for_each(|page| _ = byte(view, 0x10_0000 + page * PAGE as u64));
        range(&first);
        range(&second);
        assert_eq!((share(&first, 0x10_0000), share(&second, 0x10_0000)), (32, 32), "half of 64 KiB each");
        write(&first, 0x10_1000, &[5]).unwrap();
        assert_eq!((byte(&first, 0x10_1000), byte(&second, 0x10_1000)), (5, 1));
        assert_eq!(fs::read(&path).unwrap(), before);
    }

    /// Lets a processor read a byte at 1 MiB, and write the next number 4 KiB above.
    fn run_a_processor(view: &View) {
        // mov al, [0]; inc al; mov [0x1000], al; hlt
        const CODE: [u8; 9] = [0xA0, 0, 0, 0xFE, 0xC0, 0xA2, 0, 0x10, 0xF4];
        const CODE_AT: u64 = 0x3000;
        write(view, CODE_AT, &CODE).unwrap();
        let vm = kvm_ioctls::Kvm::new().unwrap().create_vm().unwrap();
        memory::give(&vm, view, 0).unwrap();
        let mut processor = vm.create_vcpu(0).unwrap();
        let mut segments = processor.get_sregs().unwrap();
        (segments.cs.base, segments.cs.selector) = (0, 0);
        segments.ds.base = 0x10_0000;
        processor.set_sregs(&segments).unwrap();
        let registers = kvm_bindings::kvm_regs { rip: CODE_AT, rflags: 2, ..Default::default() };
        processor.set_regs(&registers).unwrap();
        assert!(matches!(processor.run().unwrap(), kvm_ioctls::VcpuExit::Hlt));
    }

    #[test]
    #[ignore = "needs /dev/kvm"]
    fn processors_read_shared_pages_and_write_pages_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let (path, bytes) = (folder.path().join("memory"), whole());
        let views = [map_again(&path, &bytes).unwrap(), map_again(&path, &bytes).unwrap()];
        let before = fs::read(&path).unwrap();
        run_a_processor(&views[0]);
        assert_eq!([0, 1].map(|clone: usize| byte(&views[clone], 0x10_1000)), [2, 1]);
        run_a_processor(&views[1]);
        assert_eq!([0, 1].map(|clone: usize| byte(&views[clone], 0x10_1000)), [2, 2]);
        assert_eq!(fs::read(&path).unwrap(), before);
    }

    #[test]
    fn a_file_that_others_may_change_is_not_the_users_own() {
        // SAFETY: It only asks the kernel for a number.
        let own = unsafe { libc::geteuid() };
        assert!(is_own(own, 0o100_400) && is_own(0, 0o100_644) && is_own(own, 0o100_600));
        assert!(!is_own(own, 0o100_620) && !is_own(own, 0o100_602) && !is_own(own + 1, 0o100_400));
    }

    #[test]
    fn a_file_is_there_only_if_it_is_whole_and_serves_one_image() {
        let folder = tempfile::tempdir().unwrap();
        let (path, bytes) = (folder.path().join("memory"), whole());
        assert!(map_again(&path, &bytes[..bytes.len() - 40]).is_err(), "the image is torn");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        fs::write(&path, "something else").unwrap();
        let other = map_again(&path, &bytes).unwrap_err();
        assert!(other.message.contains("not the memory of this image"), "{}", other.message);
        assert_eq!(fs::read(&path).unwrap(), b"something else");
        fs::remove_file(&path).unwrap();
        map_again(&path, &bytes).unwrap();
        let mut larger = machine();
        larger.ranges[1].pages += 1;
        let larger = image(&larger, frames(), [[1; PAGE], [2; PAGE]].concat());
        assert!(map_again(&path, &larger).is_err());
        let none = map_again(&folder.path().join("no/memory"), &bytes).unwrap_err();
        assert!(none.message.contains("as the memory file"), "{}", none.message);
    }
}
