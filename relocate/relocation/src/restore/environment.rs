//! The restore environment, which brings a machine back or receives one: this system's own kernel,
//! with an initial RAM disk that holds this program, the files that it needs, and the drivers for
//! the image's disk or the network's card.

use super::{
    Prepared,
    beside::{Beside, Folders, Readers},
    init, kernel, menu,
    microcode::Entry,
    size::Need,
};
use mercury_control::{
    error::{Error, Result},
    exit::Exit,
    sysroot::Sysroot,
};
use mercury_initramfs::Archive;
use mercury_quiesce::{
    disks, mounts,
    patient::{self, PROGRAM_PATIENCE},
};
use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

/// Time for disks and servers to write back file data.
const SYNC_PATIENCE: Duration = Duration::from_secs(600);

/// Words of the running kernel's command line that are not for the restore environment. Limits of
/// the present CPUs (`nr_cpus`, `possible_cpus`, `nosmp`) are kept. Words that leave some CPUs
/// offline are dropped, because a machine with an image has brought them online since.
const DROPPED: [&str; 28] = [
    "BOOT_IMAGE",
    "initrd",
    "root",
    "rootflags",
    "rootfstype",
    "ro",
    "rw",
    "resume",
    "resume_offset",
    "init",
    "crashkernel",
    "mem",
    "memmap",
    "panic",
    "quiet",
    "splash",
    "hugepages",
    "hugepagesz",
    "default_hugepagesz",
    "hugetlb_cma",
    "cma",
    "log_buf_len",
    "swiotlb",
    "movablecore",
    "kernelcore",
    "rdinit",
    "maxcpus",
    "nosmt",
];

/// The purpose of a restore environment.
#[derive(Debug, Default)]
pub struct Purpose<'a> {
    /// Memory for its kernel in MiB, if the operator wants a certain size.
    pub memory: Option<u64>,
    /// The memory that it gets at least otherwise, in MiB.
    pub usual_memory: u64,
    /// The driver's file, if modprobe does not find it.
    pub module: Option<&'a Path>,
    /// Words for its command line that set its task.
    pub words: Vec<String>,
    /// Disks that it has to read, besides those that have file systems on them.
    pub disks: Vec<PathBuf>,
    /// Network cards that it needs, by name.
    pub cards: Vec<String>,
    /// Other modules, such as those of file systems.
    pub modules: Vec<String>,
    /// Files, by their path in the environment.
    pub files: Vec<(&'static str, Vec<u8>)>,
    /// The line in the boot menu, if there is to be one.
    pub menu_title: Option<String>,
}

fn failed(what: &str, error: &io::Error) -> Error {
    Error::new(Exit::Failed, format!("{what}: {error}")).hint("nothing was changed")
}

/// An environment that is neither on a disk nor loaded yet.
#[derive(Debug)]
pub struct Made {
    archive: Vec<u8>,
    /// Memory for its kernel, in MiB.
    pub memory: u64,
    command_line: String,
}

/// Makes an environment's initial RAM disk and command line.
///
/// # Errors
///
/// Returns an error if a file that they need is missing, or the operator wants less memory than they need.
pub fn make(purpose: &Purpose<'_>, sysroot: &Sysroot) -> Result<Made> {
    let archive = archive(purpose, sysroot)?;
    let memory = Need::of(archive.len() as u64, sysroot).choose(purpose.memory, purpose.usual_memory)?;
    Ok(Made { archive, memory, command_line: command_line(purpose, memory, sysroot) })
}

/// Writes kernel and initial RAM disk into a folder. Older files stay until the new ones are
/// complete.
///
/// # Errors
///
/// Returns an error if a file that they need is missing.
pub fn write(purpose: &Purpose<'_>, folder: &Path, sysroot: &Sysroot) -> Result<Prepared> {
    let from = kernel::image(sysroot)?;
    let Made { archive, command_line, memory } = make(purpose, sysroot)?;
    let image = patient::read_whole(&from).map_err(|error| failed(&from.display().to_string(), &error))?;
    let _folders = Folders::make(folder).map_err(|error| failed(&folder.display().to_string(), &error))?;
    let title = purpose.menu_title.clone();
    let loader = title.as_ref().map(|_| menu::Loader::find(folder, sysroot)).transpose()?;
    let (kernel, initramfs) = (folder.join("vmlinuz"), folder.join("initramfs"));
    put([(&kernel, &image), (&initramfs, &archive)])?;
    let entry = menu::Entry { title: title.unwrap_or_default(), kernel, initramfs, command_line };
    let boot_menu = loader.map(|loader| loader.write(&entry)).transpose()?;
    if let Some(made) = &boot_menu {
        disks::settle(&made.file, sysroot)?;
    }
    let menu::Entry { kernel, initramfs, command_line, .. } = entry;
    Ok(Prepared { kernel, initramfs, command_line, boot_menu, memory_mib: memory })
}

/// Puts two files that belong together into their places. Only root may read the initial RAM disk,
/// because it may hold a receiver's private key.
fn put(files: [(&Path, &[u8]); 2]) -> Result<()> {
    let written = files.map(|(path, bytes)| {
        let new = Beside::write(path, bytes, Readers::Owner);
        new.map_err(|error| failed(&path.display().to_string(), &error))
    });
    let [first, second] = written;
    let (first, second) = (first?, second?);
    first.put().and_then(|()| second.put()).map_err(|error| {
        let [first, second] = files.map(|(path, _)| path.display().to_string());
        failed(&format!("{first} and {second} could not be replaced"), &error)
            .hint("the two files may not match now: prepare again, in another folder if need be")
    })
}

/// A restore environment that the kernel has loaded, and that can be started.
#[derive(Debug)]
pub struct Ready(());

/// Loads the environment into the kernel.
///
/// # Errors
///
/// Returns an error if the kernel refuses.
pub fn load(made: &Made, sysroot: &Sysroot) -> Result<Ready> {
    let kernel = kernel::image(sysroot)?;
    let named = |error: io::Error| failed("the restore environment could not be prepared", &error);
    // The kernel reads it again, from memory then, and would wait for its disk without a limit.
    patient::read_whole(&kernel).map_err(named)?;
    let kernel = File::open(&kernel).map_err(named)?;
    let initramfs = memory_file(&made.archive).map_err(named)?;
    let mut line = made.command_line.clone().into_bytes();
    line.push(0);
    // SAFETY: the descriptors are open, and the command line has the given length, with its NUL.
    let result = unsafe {
        libc::syscall(
            libc::SYS_kexec_file_load,
            kernel.as_raw_fd(),
            initramfs.as_raw_fd(),
            line.len(),
            line.as_ptr(),
            0_u64,
        )
    };
    if result != 0 {
        let error = io::Error::last_os_error();
        return Err(failed("the kernel does not accept another kernel (kexec)", &error)
            .hint("--prepare makes a restore environment for the boot menu"));
    }
    Ok(Ready(()))
}

/// Unloads the environment from the kernel.
pub fn unload(_ready: Ready) {
    const KEXEC_FILE_UNLOAD: u64 = 1;
    // SAFETY: with this flag the kernel reads no other argument.
    unsafe { libc::syscall(libc::SYS_kexec_file_load, -1, -1, 0, std::ptr::null::<u8>(), KEXEC_FILE_UNLOAD) };
}

/// Starts the environment in place of this system. Returns only if that fails.
///
/// # Errors
///
/// Always returns an error if it returns.
pub fn start(_ready: Ready) -> Result<()> {
    patient::sync_everything(SYNC_PATIENCE)
        .map_err(|error| failed("writing file data back to disk", &error))?;
    // SAFETY: touches no memory of this process.
    unsafe { libc::reboot(libc::LINUX_REBOOT_CMD_KEXEC) };
    Err(failed("starting the restore environment", &io::Error::last_os_error()))
}

fn memory_file(bytes: &[u8]) -> io::Result<File> {
    let mut file = File::from(rustix::fs::memfd_create("mercury", rustix::fs::MemfdFlags::CLOEXEC)?);
    io::Write::write_all(&mut file, bytes)?;
    Ok(file)
}

fn command_line(purpose: &Purpose<'_>, memory: u64, sysroot: &Sysroot) -> String {
    command_line_after(&sysroot.text("proc/cmdline").unwrap_or_default(), purpose, memory)
}

/// Returns the command line: the running kernel's options, because they set how its hardware is
/// used, without those that set its task.
#[must_use]
pub fn command_line_after(running: &str, purpose: &Purpose<'_>, memory: u64) -> String {
    // Words after "--" are for the first process.
    let kept = running.split_whitespace().take_while(|word| *word != "--").filter(|word| {
        let name = word.split('=').next().unwrap_or(word);
        // With 0 the word says that there is one CPU.
        let is_dropped = DROPPED.contains(&name) && *word != "maxcpus=0";
        !is_dropped && !name.starts_with("systemd.") && !name.starts_with("rd.")
    });
    let mut words: Vec<String> = kept.map(str::to_owned).collect();
    words.push(format!("mem={memory}M"));
    // A root in tmpfs, the kernel's choice, has room for half of the memory that is free.
    words.push("rootfstype=ramfs".to_owned());
    words.extend(["swiotlb=noforce", "numa=off", "panic=10", "nmi_watchdog=0", "quiet"].map(str::to_owned));
    words.extend(purpose.words.iter().cloned());
    words.join(" ")
}

/// Makes the initial RAM disk.
fn archive(purpose: &Purpose<'_>, sysroot: &Sysroot) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    let mut folders = BTreeSet::new();
    let mut add = |path: &Path, data: &[u8]| {
        let name = path.to_string_lossy().trim_start_matches('/').to_owned();
        for (at, _) in name.match_indices('/') {
            if folders.insert(name[..at].to_owned()) {
                archive.directory(&name[..at]);
            }
        }
        archive.file(&name, data);
    };
    let named = |path: &Path| {
        let path = path.display().to_string();
        move |error: io::Error| failed(&path, &error)
    };
    let program = std::env::current_exe().map_err(named(Path::new("/proc/self/exe")))?;
    let elf = patient::read_whole(&program).map_err(named(&program))?;
    for library in libraries(sysroot, &program, &elf) {
        add(&library, &loadable(patient::read_whole(&library).map_err(named(&library))?));
    }
    add(Path::new("init"), &loadable(elf));
    let mut names = Vec::new();
    for (name, data) in &purpose.files {
        add(Path::new(name), data);
    }
    for module in modules(purpose, sysroot)? {
        let data = module_bytes(&module).map_err(named(&module))?;
        let name = format!("modules/{:03}.ko", names.len());
        add(Path::new(&name), &data);
        names.push(name);
    }
    add(Path::new(init::MODULES), names.join("\n").as_bytes());
    for folder in ["proc", "sys", "dev", "mnt"] {
        archive.directory(folder);
    }
    archive.char_device("dev/console", (5, 1));
    let mut bytes = early_microcode(sysroot);
    bytes.extend(archive.finish());
    Ok(bytes)
}

/// Returns the path of this system's own initial RAM disk.
pub(super) fn initial_ram_disk(sysroot: &Sysroot) -> String {
    format!("boot/initrd.img-{}", kernel::release(sysroot))
}

/// Returns the early archives with microcode of this system's own initial RAM disk, if there are any,
/// because processors must be the same as before.
pub(super) fn early_microcode(sysroot: &Sysroot) -> Vec<u8> {
    let whole = patient::read_whole(&sysroot.path(&initial_ram_disk(sysroot))).unwrap_or_default();
    let end = early_end(&whole).unwrap_or(0);
    whole[..end].to_vec()
}

/// Returns the end of the last archive that has microcode in it and is not compressed. There may be an
/// archive for each vendor.
fn early_end(bytes: &[u8]) -> Option<usize> {
    let (mut at, mut found, mut end) = (0, false, None);
    while let Some(entry) = Entry::read(bytes, at) {
        found |= entry.name.starts_with(b"kernel/x86/microcode/");
        at = entry.next;
        if entry.is_last && found && at <= bytes.len() {
            (found, end) = (false, Some(at));
        }
    }
    end
}

/// Returns the libraries that this program was linked with when it was started, and its
/// interpreter.
fn libraries(sysroot: &Sysroot, program: &Path, elf: &[u8]) -> BTreeSet<PathBuf> {
    let maps = sysroot.text("proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let mapped: BTreeSet<PathBuf> =
        paths.filter(|path| path.starts_with('/') && path.contains(".so")).map(PathBuf::from).collect();
    let interpreter = interpreter(elf);
    // The interpreter is mapped by its real path, and the program may name another one.
    mapped.into_iter().chain(interpreter).filter(|path| path != program).collect()
}

/// Reads a field of an ELF file.
fn field(bytes: &[u8], at: usize, length: usize) -> Option<usize> {
    let mut word = [0; 8];
    word[..length].copy_from_slice(bytes.get(at..at + length)?);
    usize::try_from(u64::from_le_bytes(word)).ok()
}

/// Reads the program headers: type, offset in the file, and length of each.
fn segments(elf: &[u8]) -> Option<Vec<(usize, usize, usize)>> {
    let (table, size, count) = (field(elf, 32, 8)?, field(elf, 54, 2)?, field(elf, 56, 2)?);
    let segment = |index: usize| {
        let at = table + index * size;
        Some((field(elf, at, 4)?, field(elf, at + 8, 8)?, field(elf, at + 32, 8)?))
    };
    (0..count).map(segment).collect()
}

/// Returns the path of the ELF interpreter that a program names.
fn interpreter(elf: &[u8]) -> Option<PathBuf> {
    const PT_INTERP: usize = 3;
    let (_, offset, length) = segments(elf)?.into_iter().find(|(kind, ..)| *kind == PT_INTERP)?;
    let text = elf.get(offset..offset + length)?.split(|byte| *byte == 0).next()?;
    Some(PathBuf::from(String::from_utf8_lossy(text).into_owned()))
}

/// Reduces an ELF file to the parts that are needed to run it, without symbols and debug
/// information.
fn loadable(mut elf: Vec<u8>) -> Vec<u8> {
    // Offset of the section headers; their size and number, and the index of the names.
    const SECTION_TABLE: [std::ops::Range<usize>; 2] = [40..48, 58..64];
    let ends = segments(&elf).unwrap_or_default().into_iter().map(|(_, offset, length)| offset + length);
    if let Some(end) = ends.max().filter(|end| *end >= SECTION_TABLE[1].end && *end <= elf.len()) {
        elf.truncate(end);
        SECTION_TABLE.into_iter().for_each(|range| elf[range].fill(0));
    }
    elf
}

/// Lists the files of modules in the order of loading.
fn modules(purpose: &Purpose<'_>, sysroot: &Sysroot) -> Result<Vec<PathBuf>> {
    // The disks whose fingerprints are compared with the image's, besides the disk that holds it.
    let disks = mounts::mounted(sysroot)?.into_iter().map(|mount| mount.device);
    let disks = disks.chain(purpose.disks.iter().cloned());
    let mut wanted: Vec<String> = disks.flat_map(|path| disk_modules(&path, sysroot)).collect();
    wanted.splice(0..0, storage_modules(sysroot));
    for card in &purpose.cards {
        let device = fs::canonicalize(sysroot.path(&format!("sys/class/net/{card}/device")));
        wanted.extend(device.map(|folder| modules_above(folder, &["driver/module"])).unwrap_or_default());
    }
    wanted.extend(purpose.modules.iter().cloned());
    let mut files = Vec::new();
    for name in wanted {
        for file in with_dependencies(&name, sysroot)? {
            if !files.contains(&file) {
                files.push(file);
            }
        }
    }
    let driver = match purpose.module {
        Some(path) => vec![path.to_owned()],
        // A driver that was loaded from a file may be unknown to modprobe.
        None => with_dependencies("mercury", sysroot).unwrap_or_default(),
    };
    if driver.is_empty() {
        return Err(Error::new(Exit::Failed, "the driver is not installed for the running kernel").hint(
            "`dkms status mercury` shows its state; or name the file with --module or MERCURY_MODULE",
        ));
    }
    files.extend(driver);
    Ok(files)
}

/// Lists the modules of all storage controllers on PCI, and of USB's controllers, because some
/// disks hang below other drivers than their own.
fn storage_modules(sysroot: &Sysroot) -> Vec<String> {
    let is_storage = |class: &str| class.starts_with("0x01") || class.starts_with("0x0c03");
    let module = |address: &String| {
        let folder = format!("sys/bus/pci/devices/{address}");
        let class = sysroot.text(&format!("{folder}/class"))?;
        let module = fs::canonicalize(sysroot.path(&format!("{folder}/driver/module"))).ok()?;
        is_storage(&class).then(|| module.file_name().map(|name| name.to_string_lossy().into_owned()))?
    };
    sysroot.names("sys/bus/pci/devices").iter().filter_map(module).collect()
}

/// Lists the modules of the drivers from a disk, or a file's disk, up to the root of all devices.
fn disk_modules(path: &Path, sysroot: &Sysroot) -> Vec<String> {
    let Ok(found) = fs::metadata(path) else { return Vec::new() };
    let number = if found.file_type().is_block_device() { found.rdev() } else { found.dev() };
    let device = format!("sys/dev/block/{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    let Ok(folder) = fs::canonicalize(sysroot.path(&device)) else { return Vec::new() };
    let mut names = modules_above(folder, &["driver/module", "device/driver/module"]);
    // A SCSI disk has another module than its controller.
    names.push("sd_mod".into());
    names
}

/// Lists the modules of the drivers of a device and of its ancestors, the root's first; `links`
/// lead to them.
fn modules_above(mut folder: PathBuf, links: &[&str]) -> Vec<String> {
    let mut names = Vec::new();
    while folder.starts_with("/sys/devices") {
        for link in links {
            if let Ok(module) = fs::canonicalize(folder.join(link))
                && let Some(name) = module.file_name()
            {
                names.push(name.to_string_lossy().into_owned());
            }
        }
        folder.pop();
    }
    names.reverse();
    names
}

/// Lists a module's file after those that it needs; nothing if it is built in.
fn with_dependencies(name: &str, sysroot: &Sysroot) -> Result<Vec<PathBuf>> {
    let mut modprobe = Command::new("modprobe");
    modprobe.args(["--show-depends", "--ignore-install", name]);
    let output = patient::output(modprobe, PROGRAM_PATIENCE);
    files(name, &output.map_err(|error| failed("modprobe", &error))?, sysroot)
}

/// Parses modprobe's list of a module's files.
fn files(name: &str, output: &Output, sysroot: &Sysroot) -> Result<Vec<PathBuf>> {
    if output.status.success() {
        let said = String::from_utf8_lossy(&output.stdout);
        let names = said.lines().filter_map(|line| line.strip_prefix("insmod ")?.split_whitespace().next());
        return Ok(names.map(PathBuf::from).collect());
    }
    if !is_loaded(name, sysroot) {
        // The module is built in and in no list, or its name was a guess.
        return Ok(Vec::new());
    }
    let why = String::from_utf8_lossy(&output.stderr);
    let text = format!("the module {name} is in use, and its file is not found: {}", why.trim());
    Err(Error::new(Exit::Failed, text)
        .hint("install the package of the running kernel, or run depmod; nothing was changed"))
}

/// Returns true if a module was loaded. Built-in code has no such state.
fn is_loaded(name: &str, sysroot: &Sysroot) -> bool {
    sysroot.exists(&format!("sys/module/{}/initstate", name.replace('-', "_")))
}

/// Reads a module, uncompressed for the kernel.
fn module_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let tool = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return patient::read_whole(path),
    };
    let mut command = Command::new(tool);
    command.arg("-dc").arg(path);
    let output = patient::output(command, PROGRAM_PATIENCE)?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(io::Error::other(format!("{tool}: {}", output.status)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::process::ExitStatusExt, process::ExitStatus};

    /// Makes the restore environment's command line from the running one's.
    fn line_of(running: &str, words: &[&str]) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("proc")).expect("a folder");
        fs::write(folder.path().join("proc/cmdline"), running).expect("a file");
        let words = words.iter().map(ToString::to_string).collect();
        command_line(&Purpose { words, ..Purpose::default() }, 96, &Sysroot::at(folder.path()))
    }

    #[test]
    fn cpus_are_those_that_are_there() {
        let line = line_of("nr_cpus=2 maxcpus=1 nosmt nosmt=force possible_cpus=4 maxcpus=0 quiet", &[]);
        assert!(line.starts_with("nr_cpus=2 possible_cpus=4 maxcpus=0 mem=96M "), "{line}");
    }

    #[test]
    fn options_are_kept_and_tasks_are_not() {
        let line = line_of("root=/dev/vda1 ro iommu=off systemd.unit=x.target -- single nosmt\n", &["x=1"]);
        assert!(line.starts_with("iommu=off mem=96M "), "{line}");
        assert!(line.ends_with(" x=1"), "{line}");
        assert!(!line.contains("single") && !line.contains("nosmt"), "{line}");
    }

    #[test]
    fn old_files_stay_if_a_new_one_cannot_be_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let (kernel, initramfs) = (folder.path().join("vmlinuz"), folder.path().join("initramfs"));
        let read = |path: &Path| fs::read_to_string(path).expect("a file");
        put([(&kernel, b"old"), (&initramfs, b"its")]).expect("put");
        // The second file cannot be written.
        fs::create_dir_all(folder.path().join("initramfs.mercury-new/x")).expect("folders");
        let error = put([(&kernel, b"new"), (&initramfs, b"other")]).expect_err("in the way");
        assert_eq!(error.hint.as_deref(), Some("nothing was changed"));
        assert_eq!((read(&kernel).as_str(), read(&initramfs).as_str()), ("old", "its"));
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 3);
        fs::remove_dir_all(folder.path().join("initramfs.mercury-new")).expect("gone");
        put([(&kernel, b"new"), (&initramfs, b"other")]).expect("put");
        assert_eq!((read(&kernel).as_str(), read(&initramfs).as_str()), ("new", "other"));
    }

    /// A pipe without a writer does not answer, as a disk that is gone.
    #[test]
    fn a_disk_that_does_not_answer_has_neither_modules_nor_microcode() {
        let root = tempfile::tempdir().expect("a folder");
        fs::create_dir_all(root.path().join("proc/sys/kernel")).expect("folders");
        fs::write(root.path().join("proc/sys/kernel/osrelease"), "6.1.0\n").expect("a file");
        fs::create_dir(root.path().join("boot")).expect("a folder");
        let pipe = |name: &str| {
            let path = root.path().join(name);
            rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).expect("a pipe");
            path
        };
        let pipes = [pipe("odd.ko"), pipe("boot/initrd.img-6.1.0")];
        let module = pipes[0].clone();
        let read = std::thread::spawn(move || module_bytes(&module).expect_err("no answer").kind());
        assert!(early_microcode(&Sysroot::at(root.path())).is_empty());
        assert_eq!(read.join().expect("it ends"), io::ErrorKind::TimedOut);
        // The children that were left behind end.
        for pipe in pipes {
            drop(fs::OpenOptions::new().read(true).write(true).open(pipe).expect("its other end"));
        }
    }

    #[test]
    fn microcode_comes_first() {
        let mut early = Archive::default();
        early.file("kernel/x86/microcode/AuthenticAMD.bin", b"odd");
        let mut early = early.finish();
        early.resize(early.len().next_multiple_of(512), 0);
        let whole = [&early[..], b"\x28\xb5\x2f\xfd compressed"].concat();
        assert_eq!(early_end(&whole), Some(early.len()));
        let mut other = Archive::default();
        other.file("init", b"x");
        let other = other.finish();
        assert_eq!(early_end(&other), None);
        assert_eq!(early_end(&early[..100]), None);
        assert_eq!(early_end(b""), None);
        // One archive for each vendor, and one with other things between them.
        let mut intel = Archive::default();
        intel.file("kernel/x86/microcode/GenuineIntel.bin", b"even");
        let intel = intel.finish();
        let both = [&early[..], &other, &intel].concat();
        assert_eq!(early_end(&[&both[..], &other].concat()), Some(both.len()));
        for cut in 0..both.len() {
            let end = early_end(&both[..cut]);
            assert!(end.is_none_or(|end| end <= cut), "{cut}");
        }
    }

    #[test]
    fn modules_that_are_in_use_are_needed() {
        let root = tempfile::tempdir().expect("a folder");
        for folder in ["sys/module/pcieportdrv", "sys/module/dm_odd"] {
            fs::create_dir_all(root.path().join(folder)).expect("folders");
        }
        fs::write(root.path().join("sys/module/dm_odd/initstate"), "live\n").expect("a file");
        let said = |name: &str, status: i32, stdout: &str| {
            let (stdout, stderr) = (stdout.into(), b"modprobe: FATAL: not found\n".to_vec());
            let output = Output { status: ExitStatus::from_raw(status << 8), stdout, stderr };
            files(name, &output, &Sysroot::at(root.path()))
        };
        let found = said("dm-odd", 0, "insmod /lib/a.ko.xz \nbuiltin b\ninsmod /lib/c.ko x=1\n");
        assert_eq!(found.expect("found"), ["/lib/a.ko.xz", "/lib/c.ko"].map(PathBuf::from));
        // One module is built in, one a guess.
        for name in ["pcieportdrv", "nls_ascii"] {
            assert_eq!(said(name, 1, "").expect("not needed"), Vec::<PathBuf>::new());
        }
        for name in ["dm-odd", "dm_odd"] {
            let error = said(name, 1, "insmod /lib/a.ko.xz \n").expect_err("needed");
            assert!(error.message.ends_with("is not found: modprobe: FATAL: not found"), "{error}");
        }
    }

    #[test]
    fn programs_keep_what_runs() {
        let program = fs::read(std::env::current_exe().expect("a path")).expect("a file");
        let stripped = loadable(program.clone());
        assert!(stripped.len() < program.len());
        assert_eq!(segments(&stripped), segments(&program));
        assert_eq!(loadable(b"#!/bin/sh".to_vec()), b"#!/bin/sh");
    }
}
