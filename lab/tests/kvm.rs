//! KVM uses the same hardware. Whoever comes second is told so, and nobody comes to harm.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use mercury_lab::{Background, Kernel, Machine, Qemu, Result, Spec, operator::complaints};

const MINUTE: Duration = Duration::from_secs(60);

/// Makes a virtual machine and keeps it until its standard input ends; says what came of it.
const VM: &str = r#"
import errno, fcntl, os, sys
kvm = os.open("/dev/kvm", os.O_RDWR)
try:
    vm = fcntl.ioctl(kvm, 0xae01, 0)
    print("made", flush=True)
    sys.stdin.readline()
except OSError as error:
    print(errno.errorcode[error.errno], flush=True)
"#;

fn boot(kernel: Kernel) -> Result<Machine> {
    let machine = Machine::boot(Spec::new(kernel))?;
    machine.put("/root/vm", VM.as_bytes(), 0o644)?;
    Ok(machine)
}

/// A virtual machine that lives until its input ends.
fn make_vm(machine: &Machine) -> Result<Background> {
    let mut vm = machine.spawn("python3 /root/vm")?;
    vm.wait_output("made", MINUTE)?;
    Ok(vm)
}

fn end_vm(vm: Background) -> Result<()> {
    vm.close_stdin()?;
    vm.wait(MINUTE)?.check().map(drop)
}

/// KVM cannot make a virtual machine, and says that somebody else has the hardware.
fn vm_is_refused(machine: &Machine, error: &str) -> Result<()> {
    assert_eq!(machine.sh("python3 /root/vm")?, error);
    Ok(())
}

fn notice(machine: &Machine) -> Result<()> {
    let module = machine.vendor().kvm_module();
    machine.sh(&format!("dmesg | grep 'mercury: {module} will find .* in use'")).map(drop)
}

/// Attach is refused because of KVM, and doctor has said so.
fn kvm_is_in_the_way(machine: &Machine, command: &str) -> Result<String> {
    let doctor = machine.run("mercury --json doctor")?;
    assert_eq!(doctor.code(), Some(3));
    for part in ["\"can_attach\": \"no\"", "virtualization-in-use"] {
        assert!(doctor.stdout.contains(part), "{part} is not in {}", doctor.stdout);
    }
    let refusal = machine.mercury_refused(command)?;
    assert_eq!((refusal.exit, refusal.code.as_str()), (3, "virtualization-in-use"), "{refusal:?}");
    assert!(refusal.text.contains(machine.vendor().kvm_module()), "{refusal:?}");
    assert!(!machine.modes()?.contains("attached"));
    Ok(refusal.text)
}

/// KVM enables the hardware when its first virtual machine is made, not before.
fn kvm_that_enables_late(kernel: Kernel, load_kvm: &str, refused: &str) -> Result<()> {
    let machine = boot(kernel)?;
    let module = machine.vendor().kvm_module();
    let load_kvm = &load_kvm.replace("MODULE", module);
    let work = machine.start_work()?;
    machine.sh(load_kvm)?;

    // KVM is there and has nothing to do: both live side by side, and KVM is second.
    machine.mercury("attach")?;
    vm_is_refused(&machine, refused)?;
    assert_eq!(machine.modes()?, "attached attached");
    machine.mercury("detach")?;

    // KVM is first.
    let vm = make_vm(&machine)?;
    let text = kvm_is_in_the_way(&machine, "attach --unload-kvm")?;
    assert!(text.contains("must stop first"), "{text}");
    end_vm(vm)?;
    machine.mercury("attach")?;

    // KVM comes while the hypervisor is there.
    machine.sh(&format!("rmmod {module} kvm"))?;
    machine.sh(load_kvm)?;
    notice(&machine)?;
    vm_is_refused(&machine, refused)?;
    assert_eq!(machine.modes()?, "attached attached");
    machine.mercury("detach")?;
    end_vm(make_vm(&machine)?)?;
    machine.check_next_attach()?;
    work.finish()
}

#[test]
fn kvm_on_6_1() -> Result<()> {
    kvm_that_enables_late(Kernel::BookwormCloud, "modprobe MODULE", "EBUSY")
}

#[test]
fn kvm_on_6_12_without_svm_at_load() -> Result<()> {
    let load = "modprobe kvm enable_virt_at_load=0 && modprobe MODULE";
    kvm_that_enables_late(Kernel::TrixieCloud, load, "EIO")
}

#[test]
fn kvm_on_6_12_takes_svm_at_load() -> Result<()> {
    let machine = boot(Kernel::TrixieCloud)?;
    let module = machine.vendor().kvm_module();
    let work = machine.start_work()?;
    machine.sh(&format!("modprobe {module}"))?;
    kvm_is_in_the_way(&machine, "attach")?;
    let vm = make_vm(&machine)?;
    let text = kvm_is_in_the_way(&machine, "attach --unload-kvm")?;
    assert!(text.contains("must stop first"), "{text}");
    end_vm(vm)?;
    assert_eq!(machine.mercury("attach --unload-kvm")?["prepared"]["kvm_unloaded"], true);
    assert_eq!(machine.modes()?, "attached attached");
    machine.sh(&format!("! grep -w ^{module} /proc/modules"))?;

    // It wants to come back.
    assert!(!machine.run(&format!("modprobe {module}"))?.success());
    notice(&machine)?;
    assert_eq!(machine.modes()?, "attached attached");
    machine.mercury("detach")?;
    machine.sh(&format!("modprobe {module}"))?;
    end_vm(make_vm(&machine)?)?;
    kvm_is_in_the_way(&machine, "attach")?;
    machine.sh(&format!("rmmod {module} kvm"))?;
    machine.check_next_attach()?;
    work.finish()
}

/// The hypervisor is beneath, `prepare` has been done to KVM, the kernel dies: its crash kernel runs.
fn crash(kernel: Kernel, prepare: &str) -> Result<()> {
    // QEMU 7 may hang where a kernel boots again on several CPUs (docs/lab.md).
    let spec = Spec::new(kernel).qemu_version(Qemu::Newer).kernel_arg("crashkernel=256M");
    let machine = Machine::boot(spec)?;
    machine.sh(
        "kexec -p /boot/vmlinuz-$(uname -r) --initrd=/mercury/initramfs/$(uname -r).cpio --reuse-cmdline",
    )?;
    machine.mercury("attach")?;
    machine.sh(&prepare.replace("MODULE", machine.vendor().kvm_module()))?;
    machine.check_health()?;
    let boots = machine.boots();
    machine.spawn("echo c > /proc/sysrq-trigger")?;
    machine.wait_reboot(boots)?;
    machine.sh("test -s /proc/vmcore")?;
    assert_eq!(complaints(&machine.sh("dmesg")?), [""; 0]);
    Ok(())
}

#[test]
fn a_crash_beside_idle_kvm_on_6_1() -> Result<()> {
    crash(Kernel::BookwormCloud, "modprobe MODULE")
}

#[test]
fn a_crash_beside_idle_kvm_on_6_12() -> Result<()> {
    crash(Kernel::TrixieCloud, "modprobe kvm enable_virt_at_load=0 && modprobe MODULE")
}

#[test]
fn a_crash_after_kvm_has_gone_on_6_12() -> Result<()> {
    crash(
        Kernel::TrixieCloud,
        "modprobe kvm enable_virt_at_load=0 && modprobe MODULE && rmmod MODULE kvm && ! modprobe MODULE",
    )
}
