//! The kernel module: loading and removing it.

use crate::{
    device,
    error::{Error, Result},
    exit::Exit,
    sysroot::{Module, Sysroot},
};
use mercury_abi::code::Code;
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};
use std::{
    ffi::{CStr, CString},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

pub const NAME: &CStr = c"mercury";

/// Time for the device node to appear after the module is loaded.
const NODE_TIMEOUT: Duration = Duration::from_secs(3);

/// Modules of KVM, which take hardware virtualization for themselves.
const KVM: [&str; 2] = ["kvm_amd", "kvm_intel"];

/// Modules of hypervisors that Mercury cannot share the hardware with on any processor.
/// switch/driver/attach/events.c has the same list.
const RIVALS: [&str; 3] = ["vboxdrv", "vmmon", "jailhouse"];

/// Returns the modules that may hold hardware virtualization now.
#[must_use]
pub fn holders(sysroot: &Sysroot) -> Vec<Module> {
    sysroot.modules().into_iter().filter(|module| is_kvm(module) || is_rival(module)).collect()
}

fn is_kvm(module: &Module) -> bool {
    KVM.contains(&module.name.as_str())
}

/// Returns true for a module of another hypervisor than KVM.
#[must_use]
pub fn is_rival(module: &Module) -> bool {
    RIVALS.contains(&module.name.as_str())
}

/// Returns true for a holder that can be unloaded: a KVM without virtual machines.
#[must_use]
pub fn is_unused_kvm(module: &Module) -> bool {
    is_kvm(module) && module.references == 0
}

/// Returns the state of a parameter of KVM on AMD; `None` without it.
#[must_use]
pub fn kvm_amd_has(sysroot: &Sysroot, parameter: &str) -> Option<bool> {
    sysroot.flag(&format!("sys/module/kvm_amd/parameters/{parameter}"))
}

/// Returns the features of KVM on AMD that make a CPU detach when it runs a virtual machine with
/// them (`guest-unsupported`), while there are virtual machines.
#[must_use]
pub fn kvm_departs(sysroot: &Sysroot) -> Vec<&'static str> {
    let runs = sysroot.module("kvm_amd").is_some_and(|module| module.references > 0);
    let on = |parameter: &&str| runs && kvm_amd_has(sysroot, parameter) == Some(true);
    ["avic", "sev"].into_iter().filter(on).collect()
}

/// Describes the consequence for people.
#[must_use]
pub fn departure(with: &[&str]) -> Option<String> {
    let who = match with {
        [] => return None,
        ["sev"] => "an encrypted virtual machine (kvm_amd sev=Y)",
        // KVM uses AVIC for every virtual machine that can have it.
        _ => "a virtual machine with AVIC (kvm_amd avic=Y)",
    };
    Some(format!("a CPU that runs {who} leaves the hypervisor by itself and stays native"))
}

/// Names the modules, any of which may hold the hardware; `None` if there are none.
#[must_use]
pub fn names(holders: &[Module]) -> Option<String> {
    let names: Vec<_> = holders.iter().map(|module| module.name.as_str()).collect();
    (!names.is_empty()).then(|| names.join(" or "))
}

/// Says how to unload the holders: another hypervisor's first, because KVM may stay on AMD.
#[must_use]
pub fn release(holders: &[Module]) -> Option<String> {
    let order = |module: &&Module| (!is_rival(module), is_unused_kvm(module));
    let holder = holders.iter().min_by_key(order)?;
    let Module { name, references, .. } = holder;
    Some(match (is_rival(holder), is_unused_kvm(holder)) {
        (true, _) => format!("end the virtual machines of {name}, then `modprobe -r {name}`"),
        (_, true) => format!(
            "no virtual machine uses it: `mercury attach --unload-kvm`, or `modprobe -r {name} kvm`; \
             for good: put `options kvm enable_virt_at_load=0` into /etc/modprobe.d/mercury.conf and reboot"
        ),
        (_, false) => format!(
            "{references} virtual machines or devices use it and must stop first (`lsmod`); \
             then `mercury attach --unload-kvm`"
        ),
    })
}

/// Returns true if the module is in the kernel.
#[must_use]
pub fn is_loaded(sysroot: &Sysroot) -> bool {
    sysroot.module("mercury").is_some()
}

/// Bit of `/proc/sys/kernel/tainted`: a module was removed by force.
const FORCED_REMOVAL: u64 = 1 << 3;

/// AMD's EFER, as the driver for `/dev/cpu/*/msr` shows it, and its bit SVME.
const EFER: u64 = 0xc000_0080;
const SVME: u64 = 1 << 12;

/// Returns the evidence for a hypervisor beneath a machine without the driver; `None` if there is
/// none. Only the driver can ask the CPUs.
#[must_use]
pub fn suspect_hypervisor(sysroot: &Sysroot) -> Option<&'static str> {
    let tainted = sysroot.text("proc/sys/kernel/tainted").and_then(|text| text.parse().ok()).unwrap_or(0_u64);
    let svm = holders(sysroot).is_empty() && efer(sysroot).is_some_and(|efer| efer & SVME != 0);
    match (svm, tainted & FORCED_REMOVAL != 0) {
        (true, _) => Some("SVM is switched on, and no module is loaded that uses it"),
        (_, true) => Some("a module was removed by force since the machine was started"),
        _ => None,
    }
}

fn efer(sysroot: &Sysroot) -> Option<u64> {
    let file = std::fs::File::open(sysroot.path("dev/cpu/0/msr")).ok()?;
    let mut value = [0; 8];
    file.read_exact_at(&mut value, EFER).ok()?;
    Some(u64::from_le_bytes(value))
}

/// Loads the module if it is not loaded: from `path`, or from the running kernel's module
/// directory. Returns true if this call loaded it. Another process may load or remove it meanwhile.
///
/// # Errors
///
/// Returns an error if the kernel refuses the module, or its device does not appear.
pub fn insert(path: Option<&Path>, sysroot: &Sysroot) -> Result<bool> {
    let start = Instant::now();
    let mut inserted = false;
    while !settles_as_loaded(sysroot)? {
        let result = path.map_or_else(modprobe, insert_file);
        inserted |= match result {
            Err(failed) if failed.is_passing && start.elapsed() < NODE_TIMEOUT => false,
            result => result.map_err(|failed| failed.error)?,
        };
    }
    Ok(inserted)
}

/// The failure to load the module.
struct Insertion {
    error: Error,
    /// True if the loaded module is being removed by another process.
    is_passing: bool,
}

impl From<Error> for Insertion {
    fn from(error: Error) -> Self {
        Self { error, is_passing: false }
    }
}

fn insert_file(path: &Path) -> Result<bool, Insertion> {
    let action = || format!("loading {}", path.display());
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| {
        Error::system(&action(), errno).hint("check the path given by --module or MERCURY_MODULE")
    })?;
    match rustix::system::finit_module(&file, c"", 0) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(errno) => {
            Err(Insertion { error: insertion_error(&action(), errno), is_passing: errno == Errno::BUSY })
        }
    }
}

fn insertion_error(action: &str, errno: Errno) -> Error {
    match errno {
        Errno::KEYREJECTED | Errno::NOKEY => Error::refused(action, Code::Lockdown, None, [0; 2]),
        Errno::PERM if rustix::process::geteuid().is_root() => {
            Error::refused(action, Code::Lockdown, None, [0; 2])
        }
        Errno::NOEXEC => Error::coded(
            Code::DriverForeign,
            format!("{action} failed: the module was built for another kernel"),
        ),
        errno => Error::system(action, errno),
    }
}

fn modprobe() -> Result<bool, Insertion> {
    match Command::new("modprobe").arg("mercury").output() {
        Ok(output) if output.status.success() => Ok(true),
        Ok(output) => Err(modprobe_failure(String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let text = "the driver could not be loaded: there is no modprobe command";
            Err(Error::coded(Code::NoModprobe, text).into())
        }
        Err(error) => {
            let text = format!("the driver could not be loaded: modprobe could not be started: {error}");
            Err(Error::new(Exit::Failed, text)
                .hint("make sure that root can run modprobe, and repeat the command")
                .into())
        }
    }
}

/// Finds the reason for modprobe's failure in its output.
fn modprobe_failure(said: &str) -> Insertion {
    const LOADING: &str = "loading the driver";
    let says = |words: &str| said.contains(words);
    if says("ey was rejected") || says("Required key") {
        return Error::refused(LOADING, Code::Lockdown, None, [0; 2]).into();
    }
    if says("Operation not permitted") {
        return insertion_error(LOADING, Errno::PERM).into();
    }
    if says("Exec format error") || says("Invalid module format") {
        return insertion_error(LOADING, Errno::NOEXEC).into();
    }
    if says("not found") {
        let text = "the driver could not be loaded: it is not installed for the running kernel";
        return Error::coded(Code::DriverMissing, text).into();
    }
    let said = if said.is_empty() { "modprobe gave no reason" } else { said };
    let error = Error::new(Exit::Failed, format!("the driver could not be loaded: {said}"))
        .hint("`dmesg | tail` has the kernel's reason; `dkms status mercury` shows the driver's state");
    Insertion { error, is_passing: said.contains("Device or resource busy") }
}

/// Waits until no other process loads or removes the module; returns true if it is loaded.
///
/// # Errors
///
/// Returns an error if it is loaded and its device does not appear.
pub fn settles_as_loaded(sysroot: &Sysroot) -> Result<bool> {
    let loaded = wait_until(|| !is_loaded(sysroot) || Path::new(device::PATH).exists());
    loaded.map(|()| is_loaded(sysroot))
}

fn wait_until(ready: impl Fn() -> bool) -> Result<()> {
    let start = Instant::now();
    while !ready() {
        if start.elapsed() > NODE_TIMEOUT {
            return Err(Error::new(Exit::Failed, "the driver is loaded, but /dev/mercury did not appear")
                .hint("mount devtmpfs on /dev, or start udev"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Removes the module; no process may have the device open.
pub fn remove() -> Result<()> {
    remove_module(NAME).map_err(|errno| match errno {
        Errno::AGAIN | Errno::BUSY => Error {
            code: Some(Code::Busy),
            ..Error::new(Exit::Busy, "another process has /dev/mercury open")
        }
        .hint("end it (`fuser -v /dev/mercury` names it) and repeat the command"),
        errno => Error::system("removing the driver", errno),
    })
}

/// Unloads a KVM without virtual machines: the vendor's module, then the common one if no other
/// module needs it.
pub fn remove_kvm(module: &Module) -> Result<()> {
    let action = format!("unloading {}", module.name);
    let name = CString::new(module.name.as_str())
        .map_err(|_| Error::fault(format!("{action} failed: its name has a zero byte")))?;
    remove_module(&name).map_err(|errno| {
        Error::system(&action, errno).hint("shut down the virtual machines that use it, then try again")
    })?;
    // Another user of kvm keeps it. Without the vendor's module it does not hold the hardware.
    let _ = remove_module(c"kvm");
    Ok(())
}

fn remove_module(name: &CStr) -> rustix::io::Result<()> {
    match rustix::system::delete_module(name, OFlags::NONBLOCK.bits() as i32) {
        Err(Errno::NOENT) => Ok(()),
        result => result,
    }
}

/// Returns the path of the module for the running kernel, if it is installed there.
#[must_use]
pub fn installed(sysroot: &Sysroot, release: &str) -> Option<PathBuf> {
    let places = ["updates/dkms", "updates", "extra"];
    let endings = ["ko", "ko.xz", "ko.zst", "ko.gz"];
    let candidates = places.iter().flat_map(|place| {
        endings.map(|ending| sysroot.path(&format!("lib/modules/{release}/{place}/mercury.{ending}")))
    });
    candidates.into_iter().find(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_kvm_may_go() {
        let module = |name: &str, references| Module { name: name.into(), references, used_by: vec![] };
        assert!(is_unused_kvm(&module("kvm_amd", 0)));
        assert!(!is_unused_kvm(&module("kvm_amd", 1)));
        assert!(!is_unused_kvm(&module("vboxdrv", 0)));
    }

    #[test]
    fn modules_that_hold_the_hardware_are_named() {
        let module = |name: &str, references| Module { name: name.into(), references, used_by: vec![] };
        let both = [module("kvm_amd", 2), module("vboxdrv", 0)];
        assert_eq!(names(&both).as_deref(), Some("kvm_amd or vboxdrv"));
        assert_eq!(
            release(&both).as_deref(),
            Some("end the virtual machines of vboxdrv, then `modprobe -r vboxdrv`")
        );
        assert!(release(&both[..1]).is_some_and(|hint| hint.starts_with("2 virtual machines")));
        assert_eq!((names(&[]), release(&[])), (None, None));
    }

    #[test]
    fn a_hypervisor_without_a_module_is_suspected() {
        let root = tempfile::tempdir().expect("temporary directory");
        let sysroot = Sysroot::at(root.path());
        let put = |path: &str, bytes: &[u8], at: u64| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("parent")).expect("directory");
            let file = std::fs::File::create(path).expect("file");
            file.write_all_at(bytes, at).expect("bytes");
        };
        assert_eq!(suspect_hypervisor(&sysroot), None);
        put("proc/sys/kernel/tainted", b"4096\n", 0);
        put("dev/cpu/0/msr", &0xd01_u64.to_le_bytes(), EFER);
        assert_eq!(suspect_hypervisor(&sysroot), None, "an unsigned module, and SVM off");
        put("dev/cpu/0/msr", &0x1d01_u64.to_le_bytes(), EFER);
        assert!(suspect_hypervisor(&sysroot).is_some_and(|text| text.starts_with("SVM is switched on")));
        put("proc/modules", b"kvm_amd 208896 0 - Live 0x0\n", 0);
        assert_eq!(suspect_hypervisor(&sysroot), None, "it is KVM's");
        put("proc/sys/kernel/tainted", b"4104\n", 0);
        assert!(suspect_hypervisor(&sysroot).is_some_and(|text| text.contains("by force")));
    }

    #[test]
    fn reasons_for_a_later_detach_are_named_at_attach() {
        let root = tempfile::tempdir().expect("temporary directory");
        let sysroot = Sysroot::at(root.path());
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("parent")).expect("directory");
            std::fs::write(path, text).expect("file");
        };
        assert_eq!(kvm_departs(&sysroot), [""; 0]);
        write("proc/modules", "kvm_amd 208896 0 - Live 0x0\n");
        write("sys/module/kvm_amd/parameters/avic", "N\n");
        write("sys/module/kvm_amd/parameters/sev", "Y\n");
        assert_eq!(kvm_departs(&sysroot), [""; 0], "no virtual machine runs");
        write("proc/modules", "kvm_amd 208896 3 - Live 0x0\n");
        assert_eq!(kvm_departs(&sysroot), ["sev"]);
        write("sys/module/kvm_amd/parameters/avic", "1\n");
        assert_eq!(kvm_departs(&sysroot), ["avic", "sev"]);
        assert_eq!(departure(&[]), None);
        assert!(departure(&["sev"]).is_some_and(|text| text.contains("sev=Y")));
        assert!(departure(&["avic", "sev"]).is_some_and(|text| text.contains("avic=Y")));
    }

    /// The driver searches for the same modules.
    #[test]
    fn the_driver_knows_the_same_rivals() {
        let quoted = RIVALS.map(|name| format!("\"{name}\"")).join(", ");
        let line = format!("static const char * const rivals[] = {{ {quoted} }};");
        assert!(include_str!("../../../switch/driver/attach/events.c").contains(&line), "{line}");
    }

    #[test]
    fn signing_errors_are_named() {
        let error = insertion_error("loading x.ko", Errno::KEYREJECTED);
        assert_eq!((error.code, error.exit), (Some(Code::Lockdown), Exit::Impossible));
        assert!(insertion_error("loading x.ko", Errno::NOEXEC).message.contains("another kernel"));
        let code = |said: &str| modprobe_failure(said).error.code;
        for (said, expected) in [
            (
                "modprobe: ERROR: could not insert 'mercury': Key was rejected by service",
                Some(Code::Lockdown),
            ),
            (
                "modprobe: FATAL: Module mercury not found in directory /lib/modules/6.1.0",
                Some(Code::DriverMissing),
            ),
            ("modprobe: ERROR: could not insert 'mercury': Exec format error", Some(Code::DriverForeign)),
            ("modprobe: ERROR: could not insert 'mercury': Device or resource busy", None),
            ("", None),
        ] {
            assert_eq!(code(said), expected, "{said}");
        }
        assert!(modprobe_failure("could not insert 'mercury': Device or resource busy").is_passing);
    }

    #[test]
    fn finds_the_installed_module() {
        let root = tempfile::tempdir().expect("temporary directory");
        let directory = root.path().join("lib/modules/6.1.0-1/updates/dkms");
        std::fs::create_dir_all(&directory).expect("directory");
        let sysroot = Sysroot::at(root.path());
        assert_eq!(installed(&sysroot, "6.1.0-1"), None);
        std::fs::write(directory.join("mercury.ko.xz"), "").expect("file");
        assert_eq!(installed(&sysroot, "6.1.0-1"), Some(directory.join("mercury.ko.xz")));
    }
}
