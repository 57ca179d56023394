//! The facts that only user space can see: kernel, driver, signing, other hypervisors, memory.

use super::{
    Grade, Item,
    machine::{Asked, IMAGE_ORDER, Machine},
};
use mercury_abi::code::Code;
use mercury_control::{bits, error::Error, explain, lockdown, module};
use mercury_preflight::{KernelSupport, kernel_support};

/// Makes the items, in the order in which a reader would ask.
#[must_use]
pub fn items(machine: &Machine) -> Vec<Item> {
    let always =
        [kernel(machine), driver(machine), signing(machine), memory(machine), other_hypervisors(machine)];
    let sometimes = [
        orphaned(machine),
        locked_down(machine),
        departures(machine),
        registers(machine),
        attached(machine),
        monitor(machine),
        offline(machine),
        kexec(machine),
        livepatch(machine),
        kgdb(machine),
        iommu(machine),
    ];
    always.into_iter().chain(sometimes.into_iter().flatten()).collect()
}

fn monitor(machine: &Machine) -> Option<Item> {
    machine.monitor?;
    let text = "Mercury's monitor runs this machine as a guest of another one";
    Some(Item::new("monitor", Grade::Note, text))
}

/// Returns the refusal of `mercury attach` without --force: a kernel of a major version that was
/// never tested.
#[must_use]
pub fn refused_kernel(version: u64) -> Option<Error> {
    let unknown = kernel_support(version) == KernelSupport::Unknown;
    unknown.then(|| Error::refused("attach", Code::KernelUntested, None, [version, 0]))
}

fn kernel(machine: &Machine) -> Item {
    let version = machine.kernel_version();
    let grade = match kernel_support(version) {
        KernelSupport::Tested => {
            return Item::new("kernel", Grade::Ok, format!("{} is of a tested series", machine.release));
        }
        KernelSupport::Untested => Grade::Warning,
        KernelSupport::Unknown => Grade::Refused,
    };
    Item {
        code: Some(Code::KernelUntested.name()),
        ..Item::new("kernel", grade, bits::describe(Code::KernelUntested, [version, 0]))
            .hint(explain::entry(Code::KernelUntested).remedy)
    }
}

fn driver(machine: &Machine) -> Item {
    match (&machine.asked, &machine.driver_file) {
        (Asked::Answered { hypervisor_loaded: true, .. }, _) => {
            Item::new("driver", Grade::Ok, "loaded, with the hypervisor in memory")
        }
        (Asked::Answered { .. }, _) if machine.driver_loaded => Item::new("driver", Grade::Ok, "loaded"),
        (Asked::Answered { .. }, Some(file)) => {
            Item::new("driver", Grade::Ok, format!("installed: {}", file.display()))
        }
        (Asked::Answered { .. }, None) => Item::new("driver", Grade::Ok, "can be loaded"),
        (Asked::Unavailable(_), _) if !machine.root => {
            Item::new("driver", Grade::CannotTell, "only root can ask it").hint("run `sudo mercury doctor`")
        }
        (Asked::Unavailable(error), _) => unavailable(machine, error),
    }
}

/// Makes the item for a driver that root could not ask, so that attach could not either.
fn unavailable(machine: &Machine, error: &Error) -> Item {
    let wants_headers = error.code == Some(Code::DriverMissing) && !machine.headers;
    let hint = if wants_headers { headers(&machine.release) } else { error.hint.clone().unwrap_or_default() };
    let item = Item::new("driver", Grade::Refused, error.plain_message()).hint(hint);
    Item { code: error.code.map(Code::name), ..item }
}

/// Says how to get the files that DKMS needs to build the driver. Only Debian's own kernels have a
/// package of that name.
fn headers(release: &str) -> String {
    let get = if release.ends_with("-amd64") {
        format!("`apt install linux-headers-{release}`")
    } else {
        format!("they belong to the kernel's build, and are expected in /lib/modules/{release}/build")
    };
    format!("DKMS needs the kernel's headers: {get}, then `dkms autoinstall`")
}

/// Makes the item for Secure Boot, lockdown and forced signatures, which keep unsigned modules out.
fn signing(machine: &Machine) -> Item {
    let locked = machine.lockdown.is_some_and(|mode| mode > lockdown::Mode::None);
    let enforced = locked || machine.signatures_enforced == Some(true);
    let in_already = machine.driver_loaded || matches!(machine.asked, Asked::Answered { .. });
    let state = format!(
        "Secure Boot {}, lockdown {}",
        match machine.secure_boot {
            Some(true) => "on",
            Some(false) => "off",
            None => "absent",
        },
        machine.lockdown.map_or("absent", lockdown::Mode::name)
    );
    match (enforced, in_already) {
        (false, _) => Item::new("module signing", Grade::Ok, format!("not enforced ({state})")),
        (true, true) => {
            Item::new("module signing", Grade::Ok, format!("enforced, and the driver passes ({state})"))
        }
        (true, false) => Item {
            code: Some(Code::Lockdown.name()),
            ..Item::new(
                "module signing",
                Grade::Warning,
                format!("enforced: the driver must be signed ({state})"),
            )
            .hint(explain::entry(Code::Lockdown).remedy)
        },
    }
}

/// Makes the item for CPUs that are attached although this driver has loaded no hypervisor.
fn orphaned(machine: &Machine) -> Option<Item> {
    let Asked::Answered { attached, hypervisor_loaded: false, .. } = &machine.asked else { return None };
    (!attached.is_empty()).then(|| Item {
        code: Some(Code::OrphanedHypervisor.name()),
        ..Item::new(
            "hypervisor beneath",
            Grade::Refused,
            format!("CPUs {attached} are above a hypervisor whose driver is gone; it is not KVM"),
        )
        .hint(explain::entry(Code::OrphanedHypervisor).remedy)
    })
}

/// Makes the item for the operations that the driver refuses because of lockdown.
fn locked_down(machine: &Machine) -> Option<Item> {
    let text = match machine.lockdown? {
        lockdown::Mode::None => return None,
        lockdown::Mode::Integrity => {
            "integrity: no machine can be restored or received here; checkpoints, and moves away, work"
        }
        lockdown::Mode::Confidentiality => {
            "confidentiality: no checkpoint, no move, no restore; snapshots that stay in memory work"
        }
    };
    Some(Item {
        code: Some(Code::LockedDown.name()),
        ..Item::new("kernel lockdown", Grade::Warning, text).hint(explain::entry(Code::LockedDown).remedy)
    })
}

fn memory(machine: &Machine) -> Item {
    let held = matches!(machine.asked, Asked::Answered { hypervisor_loaded: true, .. });
    let size = (4 << IMAGE_ORDER) as u64;
    match machine.free_blocks {
        _ if held => Item::new("contiguous memory", Grade::Ok, "the hypervisor has its memory already"),
        Some(0) => Item {
            code: Some(Code::NoContiguousMemory.name()),
            ..Item::new(
                "contiguous memory",
                Grade::Warning,
                format!("no free block of {size} KiB; load may fail"),
            )
            .hint(explain::entry(Code::NoContiguousMemory).remedy)
        },
        Some(count) => {
            Item::new("contiguous memory", Grade::Ok, format!("{count} free blocks of {size} KiB"))
        }
        None => Item::new("contiguous memory", Grade::Note, "/proc/buddyinfo is not readable"),
    }
}

/// Makes the item for modules that may take the hardware. The processor's items tell if one holds
/// it now.
fn other_hypervisors(machine: &Machine) -> Item {
    let name = "other hypervisors";
    let above = |module: &str| kvm_may(machine) && matches!(module, "kvm" | "kvm_amd");
    let names: Vec<_> = machine.holders.iter().map(|module| module.name.as_str()).collect();
    let in_the_way: Vec<_> = names.iter().copied().filter(|module| !above(module)).collect();
    if names.is_empty() {
        return Item::new(name, Grade::Ok, "none loaded");
    }
    if in_the_way.is_empty() {
        let text = format!("{} loaded: virtual machines go on while attached", names.join(", "));
        return Item::new(name, Grade::Ok, text);
    }
    let text = format!("{} loaded; virtual machines cannot start while attached", in_the_way.join(", "));
    match machine.kvm_enables_at_load {
        Some(true) => Item::new(
            name,
            Grade::Note,
            format!(
                "{text}; KVM takes the hardware when it is \
            loaded"
            ),
        )
        .hint(
            "`options kvm enable_virt_at_load=0` in /etc/modprobe.d/mercury.conf makes it wait for a \
                virtual machine",
        ),
        _ => Item::new(name, Grade::Note, text),
    }
}

/// Returns true if KVM goes on above the hypervisor, as it does on AMD; the driver reports it with
/// each CPU's facts.
fn kvm_may(machine: &Machine) -> bool {
    let Asked::Answered { facts, .. } = &machine.asked else { return false };
    facts.iter().any(|facts| facts.system & mercury_abi::facts::system::KVM_MAY != 0)
}

/// Makes the item for virtual machines that make CPUs detach.
fn departures(machine: &Machine) -> Option<Item> {
    let text = module::departure(&machine.kvm_departs).filter(|_| kvm_may(machine))?;
    Some(Item::new("virtual machines", Grade::Note, text).hint(explain::entry(Code::GuestUnsupported).remedy))
}

/// Makes the item for a processor whose state is mostly unknown without a driver.
fn registers(machine: &Machine) -> Option<Item> {
    let unknown = matches!(machine.asked, Asked::Unavailable(_));
    unknown.then(|| {
        Item::new(
            "processor state",
            Grade::CannotTell,
            "control registers and MSRs are read through the driver",
        )
    })
}

fn attached(machine: &Machine) -> Option<Item> {
    match &machine.asked {
        Asked::Answered { attached, hypervisor_loaded: true, .. } if !attached.is_empty() => {
            Some(Item::new("mode", Grade::Note, format!("CPUs {attached} are attached now")))
        }
        _ => None,
    }
}

fn offline(machine: &Machine) -> Option<Item> {
    let text = || format!("CPUs {} are offline; they attach when they come online", machine.offline);
    (!machine.offline.is_empty()).then(|| Item::new("offline CPUs", Grade::Note, text()))
}

fn kexec(machine: &Machine) -> Option<Item> {
    let text = match (machine.kexec_loaded, machine.crash_kernel_loaded) {
        (false, false) => return None,
        (true, false) => "a kernel for kexec is loaded",
        (false, true) => "a crash kernel is loaded",
        (true, true) => "a crash kernel and a kernel for kexec are loaded",
    };
    Some(Item::new("kexec", Grade::Note, format!("{text}; every CPU detaches before it starts")))
}

fn livepatch(machine: &Machine) -> Option<Item> {
    let names = machine.livepatches.join(", ");
    (!names.is_empty()).then(|| Item::new("live patches", Grade::Note, format!("active: {names}")))
}

fn kgdb(machine: &Machine) -> Option<Item> {
    machine.kgdb.then(|| {
        Item::new("kernel debugger", Grade::Warning, "kgdb is configured")
            .hint("do not single-step or break while a switch runs")
    })
}

fn iommu(machine: &Machine) -> Option<Item> {
    let words: Vec<_> = machine.command_line.split_whitespace().collect();
    let passthrough = words.contains(&"iommu=pt") || words.contains(&"iommu.passthrough=1");
    match (machine.iommus, passthrough) {
        (0, _) => Some(Item::new("IOMMU", Grade::Note, "off: devices can write to the hypervisor's memory")),
        (_, true) => {
            Some(Item::new("IOMMU", Grade::Note, "passthrough: devices can write to the hypervisor's memory"))
        }
        (_, false) => None,
    }
}
