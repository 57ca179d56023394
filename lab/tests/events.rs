//! Events in a machine while the hypervisor is attached: processors come and go, and the machine
//! suspends, reboots, crashes, and gets interrupts that cannot be masked.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use mercury_abi::{
    MERCURY_ABI_VERSION,
    ioctl::{FirmwareRequest, MERCURY_IOC_FIRMWARE},
};
use mercury_lab::{
    Bus, Kernel, Machine, MachineCheck, Platform, Qemu, Reset, Result, Spec,
    operator::{Work, complaints},
};
use serde_json::Value;

const MINUTE: Duration = Duration::from_secs(60);
const ALL_FOUR: &str = "attached attached attached attached";

/// Describes a machine whose kernel boots again on several CPUs. QEMU 7 now and then executes a
/// breakpoint that was just removed, while a kernel patches itself: the kernel hangs then.
fn spec(kernel: Kernel) -> Spec {
    Spec::new(kernel).qemu_version(Qemu::Newer)
}

fn plain() -> Spec {
    spec(Kernel::BookwormCloud)
}

/// Boots a machine at work, with the hypervisor attached.
fn attached(spec: Spec) -> Result<(Machine, Work)> {
    let machine = Machine::boot(spec)?;
    let work = machine.start_work()?;
    machine.mercury("attach")?;
    Ok((machine, work))
}

// Processors come and go.

/// A script that takes CPUs offline and brings them back, so many times. `$3` checks them in
/// between.
const HOTPLUG: &str = r#"
set -eu
for round in $(seq "$1"); do
	for cpu in $2; do
		echo 0 > /sys/devices/system/cpu/cpu$cpu/online
		${3:-true}
		echo 1 > /sys/devices/system/cpu/cpu$cpu/online
		${3:-true}
	done
done
"#;

fn hotplug(machine: &Machine, rounds: u32, cpus: &str) -> Result<()> {
    let argv = [rounds.to_string(), cpus.to_owned()];
    machine.program(&["/bin/bash", "-c", HOTPLUG, "hotplug", &argv[0], &argv[1]]).run()?.check().map(drop)
}

fn processors_go_and_come_back(kernel: Kernel, cpus: &str, argument: &str) -> Result<()> {
    let (machine, work) = attached(spec(kernel).cpus(4).kernel_arg(argument))?;
    machine.sh("echo 0 > /sys/devices/system/cpu/cpu3/online")?;
    assert_eq!(machine.modes()?, "attached attached attached offline");
    machine.sh("echo 1 > /sys/devices/system/cpu/cpu3/online")?;
    assert_eq!(machine.modes()?, ALL_FOUR);
    hotplug(&machine, 7, cpus)?;
    assert_eq!(machine.modes()?, ALL_FOUR);
    // A CPU that was offline at the attach.
    machine.mercury("detach")?;
    machine.sh("echo 0 > /sys/devices/system/cpu/cpu2/online")?;
    machine.mercury("attach")?;
    machine.sh("echo 1 > /sys/devices/system/cpu/cpu2/online")?;
    assert_eq!(machine.modes()?, ALL_FOUR);
    // A CPU that was offline at the detach.
    machine.sh("echo 0 > /sys/devices/system/cpu/cpu2/online")?;
    machine.mercury("detach")?;
    machine.sh("echo 1 > /sys/devices/system/cpu/cpu2/online")?;
    assert_eq!(machine.modes()?, ALL_FOUR.replace("attached", "native"));
    machine.check_next_attach()?;
    work.finish()
}

#[test]
fn processors_go_and_come_back_on_6_1() -> Result<()> {
    // `cpu0_hotplug` would let the boot CPU go too, but Linux offers that for Intel's processors
    // only.
    processors_go_and_come_back(Kernel::BookwormCloud, "1 2 3", "quiet")
}

#[test]
#[ignore = "long"]
fn processors_go_and_come_back_on_6_12() -> Result<()> {
    processors_go_and_come_back(Kernel::TrixieCloud, "1 2 3", "quiet")
}

#[test]
#[ignore = "long"]
fn processors_that_were_not_asked_for_stay_native() -> Result<()> {
    let machine = Machine::boot(plain().cpus(4))?;
    let work = machine.start_work()?;
    machine.mercury("attach --cpus 0,2")?;
    hotplug(&machine, 2, "1 2 3")?;
    assert_eq!(machine.modes()?, "attached native attached native");
    // The last attached CPU goes offline. The wish to be attached stays.
    machine.mercury("detach --cpus 0")?;
    machine.sh("echo 0 > /sys/devices/system/cpu/cpu2/online")?;
    assert_eq!(machine.modes()?, "native native offline native");
    machine.sh("echo 1 > /sys/devices/system/cpu/cpu2/online")?;
    assert_eq!(machine.modes()?, "native native attached native");
    assert_eq!(machine.mercury("detach")?["cpus"], "2");
    machine.check_next_attach()?;
    work.finish()
}

#[test]
#[ignore = "long"]
fn processors_come_and_go_while_others_switch() -> Result<()> {
    let machine = Machine::boot(plain().cpus(4))?;
    machine.mercury("load")?;
    let mut switcher = machine.spawn("exec mercury-workload switch")?;
    hotplug(&machine, 10, "1 3")?;
    assert!(!switcher.has_ended()?, "{}", switcher.output_so_far()?);
    switcher.kill(15)?;
    // The switcher counts a CPU that is gone at its turn as a violation. No other violation may
    // occur.
    let report: Value = serde_json::from_str(switcher.wait(MINUTE)?.stdout.trim()).unwrap();
    assert!(report["passes"].as_u64() > Some(20), "{report}");
    assert!(!report.to_string().contains("wrong-mode"), "{report}");
    machine.mercury("detach")?;
    machine.check_next_attach()
}

#[test]
#[ignore = "long"]
fn new_processors_are_attached() -> Result<()> {
    let (machine, work) = attached(plain().cpus(2).max_cpus(4))?;
    machine.qmp()?.cpu_add()?;
    let last = machine.qmp()?.cpu_add()?;
    machine.sh("until [ -e /sys/devices/system/cpu/cpu3/online ]; do sleep 0.1; done")?;
    machine.sh("for cpu in 2 3; do echo 1 > /sys/devices/system/cpu/cpu$cpu/online; done")?;
    assert_eq!(machine.modes()?, ALL_FOUR);
    hotplug(&machine, 3, "2 3")?;
    assert_eq!(machine.modes()?, ALL_FOUR);
    machine.sh("echo 0 > /sys/devices/system/cpu/cpu3/online")?;
    machine.qmp()?.cpu_del(&last, MINUTE)?;
    assert_eq!(machine.modes()?, "attached attached attached offline");
    machine.check_next_attach()?;
    work.finish()
}

/// Attaches late processors, two of which are brought up by hand only. Sibling threads go the same
/// way when `smt/control` says so; QEMU has none for AMD's processors.
#[test]
#[ignore = "long"]
fn late_processors_are_attached() -> Result<()> {
    let (machine, work) = attached(plain().cpus(4).kernel_arg("maxcpus=2"))?;
    assert_eq!(machine.modes()?, "attached attached offline offline");
    machine.sh("for cpu in 2 3; do echo 1 > /sys/devices/system/cpu/cpu$cpu/online; done")?;
    assert_eq!(machine.modes()?, ALL_FOUR);
    machine.check_next_attach()?;
    work.finish()
}

// The machine ends, or starts again.

/// Makes the machine boot again by `command`, and checks its health. On several CPUs Bochs's timers
/// are in disorder after a reset, without a hypervisor too: kernels stall.
fn comes_up_again(kernel: Kernel, command: &str) -> Result<()> {
    let cpus = if Platform::chosen()? == Platform::Qemu { 4 } else { 1 };
    let (machine, _work) = attached(spec(kernel).cpus(cpus).reset(Reset::Restarts))?;
    let boots = machine.boots();
    machine.spawn(command)?;
    machine.wait_reboot(boots)?;
    machine.check_next_attach()
}

const REBOOT_AT_ONCE: &str = "python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x01234567)'";

#[test]
fn reboot() -> Result<()> {
    comes_up_again(Kernel::BookwormCloud, "reboot")
}

#[test]
#[ignore = "long"]
fn reboot_on_6_12() -> Result<()> {
    comes_up_again(Kernel::TrixieCloud, "reboot")
}

#[test]
#[ignore = "long"]
fn reboot_at_once() -> Result<()> {
    comes_up_again(Kernel::BookwormCloud, REBOOT_AT_ONCE)
}

/// A request that waits for a page of its caller, which never comes. The request holds the driver's lock.
const REQUEST: &str = r#"
import ctypes, fcntl, mmap, os, struct, sys
USERFAULTFD, UFFDIO_API, UFFDIO_REGISTER, MISSING = 323, 0xC018AA3F, 0xC020AA00, 1
handler = ctypes.CDLL(None).syscall(USERFAULTFD, os.O_CLOEXEC)
fcntl.ioctl(handler, UFFDIO_API, bytearray(struct.pack("<QQQ", 0xAA, 0, 0)))
memory = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
fcntl.ioctl(handler, UFFDIO_REGISTER, bytearray(struct.pack("<QQQQ", address, 4096, MISSING, 0)))
number, size, version = map(int, sys.argv[1:])
request = bytearray(struct.pack("<IIQQ", size, version, 0, address).ljust(size, bytes(1)))
fcntl.ioctl(os.open("/dev/mercury", os.O_RDWR), number, request)
"#;

/// Reboots although a request never ends.
#[test]
#[ignore = "long"]
fn reboot_while_a_request_waits() -> Result<()> {
    let machine = Machine::boot(plain().cpus(2).reset(Reset::Restarts))?;
    machine.mercury("attach")?;
    machine.put("/run/request.py", REQUEST.as_bytes(), 0o644)?;
    let size = size_of::<FirmwareRequest>();
    machine.sh(&format!(
        "setsid python3 /run/request.py {MERCURY_IOC_FIRMWARE} {size} {MERCURY_ABI_VERSION} < /dev/null > \
         /run/said 2>&1 & for i in $(seq 300); do grep -q userfault /proc/$!/wchan && exit; sleep 0.1; done; \
         cat /run/said; exit 1"
    ))?;
    let boots = machine.boots();
    machine.spawn(REBOOT_AT_ONCE)?;
    machine.wait_reboot(boots)?;
    machine.check_next_attach()
}

#[test]
#[ignore = "long"]
fn reset_by_sysrq() -> Result<()> {
    comes_up_again(Kernel::BookwormCloud, "echo b > /proc/sysrq-trigger")
}

#[test]
#[ignore = "long"]
fn reset_by_sysrq_on_6_12() -> Result<()> {
    comes_up_again(Kernel::TrixieCloud, "echo b > /proc/sysrq-trigger")
}

#[test]
#[ignore = "long"]
fn poweroff() -> Result<()> {
    let (machine, _work) = attached(plain().cpus(4))?;
    machine.spawn("poweroff")?;
    assert!(machine.wait_shutdown(MINUTE)?.success());
    machine.check_console()?;
    machine.forgive();
    Ok(())
}

/// Loads the same kernel again, for `kexec -e` (`-l`) or for a crash (`-p`).
fn kexec_load(machine: &Machine, how: &str) -> Result<()> {
    machine
        .sh(&format!(
            "kexec {how} /boot/vmlinuz-$(uname -r) --initrd=/mercury/initramfs/$(uname -r).cpio \
             --reuse-cmdline --append='lab.kexeced=1'"
        ))
        .map(drop)
}

fn kexec(kernel: Kernel) -> Result<()> {
    let (machine, _work) = attached(spec(kernel).cpus(4))?;
    kexec_load(&machine, "-l")?;
    let boots = machine.boots();
    machine.spawn("kexec -e")?;
    machine.wait_reboot(boots)?;
    machine.sh("grep -q lab.kexeced /proc/cmdline")?;
    assert_eq!(machine.sh("nproc")?, "4");
    machine.check_next_attach()
}

#[test]
#[ignore = "long"]
fn kexec_on_6_1() -> Result<()> {
    kexec(Kernel::BookwormCloud)
}

#[test]
fn kexec_on_6_12() -> Result<()> {
    kexec(Kernel::TrixieCloud)
}

/// Boots an attached machine with a crash kernel.
fn with_crash_kernel(kernel: Kernel) -> Result<Machine> {
    let machine = Machine::boot(spec(kernel).cpus(4).kernel_arg("crashkernel=256M"))?;
    kexec_load(&machine, "-p")?;
    machine.mercury("attach")?;
    Ok(machine)
}

/// Checks that the crash kernel runs natively, and can read the dead kernel's memory.
fn crash_kernel_runs(machine: &Machine, boots: u32, panic: &str) -> Result<()> {
    crash_kernel_runs_after(machine, boots, panic, panic)
}

/// Checks the crash kernel as well. The console must show `panic`, and may show `perhaps`.
fn crash_kernel_runs_after(machine: &Machine, boots: u32, panic: &str, perhaps: &str) -> Result<()> {
    machine.wait_reboot(boots)?;
    machine.sh("grep -q lab.kexeced /proc/cmdline && test -s /proc/vmcore")?;
    assert_eq!(complaints(&machine.sh("dmesg")?), [""; 0]);
    let console = machine.serial_log();
    let expected = |line: &str| line.contains(panic) || line.contains(perhaps);
    let unexpected: Vec<_> = complaints(&console).into_iter().filter(|line| !expected(line)).collect();
    assert!(unexpected.is_empty() && console.contains(panic), "{unexpected:#?}");
    Ok(())
}

/// Checks that Mercury works in the crash kernel as well.
fn crash_kernel_attaches(machine: &Machine) -> Result<()> {
    machine.mercury("attach")?;
    assert!(machine.modes()?.starts_with("attached"));
    machine.mercury("detach").map(drop)
}

fn crash(kernel: Kernel, cpu: u32) -> Result<()> {
    let machine = with_crash_kernel(kernel)?;
    let boots = machine.boots();
    machine.spawn(&format!("taskset -c {cpu} sh -c 'echo c > /proc/sysrq-trigger'"))?;
    crash_kernel_runs(&machine, boots, "Kernel panic - not syncing: sysrq triggered crash")?;
    crash_kernel_attaches(&machine)
}

#[test]
#[ignore = "long"]
fn crash_on_cpu_0_on_6_1() -> Result<()> {
    crash(Kernel::BookwormCloud, 0)
}

#[test]
#[ignore = "long"]
fn crash_on_cpu_3_on_6_1() -> Result<()> {
    crash(Kernel::BookwormCloud, 3)
}

#[test]
#[ignore = "long"]
fn crash_on_cpu_0_on_6_12() -> Result<()> {
    crash(Kernel::TrixieCloud, 0)
}

#[test]
fn crash_on_cpu_3_on_6_12() -> Result<()> {
    crash(Kernel::TrixieCloud, 3)
}

#[test]
#[ignore = "long"]
fn panic_without_a_crash_kernel() -> Result<()> {
    let (machine, _work) = attached(plain().cpus(4).reset(Reset::Restarts))?;
    let boots = machine.boots();
    machine.spawn("echo c > /proc/sysrq-trigger")?;
    machine.wait_reboot(boots)?;
    assert!(machine.serial_log().contains("sysrq triggered crash"));
    assert_eq!(complaints(&machine.sh("dmesg")?), [""; 0]);
    machine.mercury("attach")?;
    machine.mercury("detach").map(drop)
}

// The machine sleeps.

/// Suspends to memory once: after a wake-up QEMU's Q35 takes no further request to sleep, natively
/// either.
fn suspend_to_memory(kernel: Kernel) -> Result<()> {
    let (machine, work) = attached(spec(kernel).cpus(4))?;
    let sleeper = machine.spawn("echo mem > /sys/power/state && echo awake")?;
    wait_status(&machine, "suspended")?;
    machine.qmp()?.system_wakeup()?;
    let said = sleeper.wait(2 * MINUTE)?.check()?.stdout;
    assert!(said.contains("awake"), "{said}");
    assert_eq!(machine.modes()?, ALL_FOUR);
    machine.check_next_attach()?;
    work.finish()
}

fn wait_status(machine: &Machine, wanted: &str) -> Result<()> {
    mercury_lab::error::wait_for(&format!("the machine to be {wanted}"), 2 * MINUTE, || {
        Ok((machine.qmp()?.status()? == wanted).then_some(()))
    })
}

#[test]
#[ignore = "long"]
fn suspend_to_memory_on_6_1() -> Result<()> {
    suspend_to_memory(Kernel::BookwormCloud)
}

#[test]
fn suspend_to_memory_on_6_12() -> Result<()> {
    suspend_to_memory(Kernel::TrixieCloud)
}

/// Suspends to idle. The keyboard wakes the machine; the cloud kernel has no driver for it.
#[test]
#[ignore = "long"]
fn suspend_to_idle() -> Result<()> {
    let (machine, work) = attached(spec(Kernel::BookwormGeneric).cpus(4))?;
    machine.sh("modprobe i8042 && modprobe atkbd && udevadm settle 2>/dev/null; \
                until ls /sys/bus/serio/devices/*/power/wakeup; do sleep 0.1; done; \
                for device in /sys/bus/serio/devices/*/power/wakeup; do echo enabled > $device; done")?;
    let mut sleeper = machine.spawn("echo freeze > /sys/power/state && echo awake")?;
    let end = Instant::now() + 2 * MINUTE;
    // A key that comes too early ends no sleep.
    while !sleeper.has_ended()? && Instant::now() < end {
        std::thread::sleep(Duration::from_secs(3));
        machine.qmp()?.human("sendkey ret")?;
    }
    let said = sleeper.wait(MINUTE)?.check()?.stdout;
    assert!(said.contains("awake"), "{said}");
    machine.sh("dmesg | grep 'suspend entry (s2idle)' && dmesg | grep 'suspend exit'")?;
    assert_eq!(machine.modes()?, ALL_FOUR);
    machine.check_next_attach()?;
    work.finish()
}

/// Hibernates: the image is written to the disk and read back, and the machine goes on from it. 6.1
/// cannot do so, since it keeps the disk open (`test_resume` says EBUSY there, natively too).
#[test]
#[ignore = "long"]
fn hibernation() -> Result<()> {
    let (machine, work) = attached(spec(Kernel::TrixieCloud).cpus(4).disk(Bus::Virtio, 1024))?;
    machine.sh("mkswap /dev/vda && swapon /dev/vda && cat /sys/class/block/vda/dev > /sys/power/resume")?;
    machine.sh("echo test_resume > /sys/power/disk")?;
    machine.command("echo disk > /sys/power/state").timeout(4 * MINUTE).run()?.check()?;
    // The log is the image's: it has the beginning and the end, but nothing after the image.
    machine
        .sh("dmesg | grep 'hibernation: hibernation exit' && ! dmesg | grep 'hibernation: Image created'")?;
    assert_eq!(machine.modes()?, ALL_FOUR);
    machine.check_next_attach()?;
    work.finish()
}

/// Runs all steps of hibernation with devices and processors, up to the image and back.
#[test]
#[ignore = "long"]
fn hibernation_without_an_image() -> Result<()> {
    let spec = spec(Kernel::BookwormGeneric).cpus(4).disk(Bus::Virtio, 1024);
    let (machine, work) = attached(spec)?;
    machine.sh("mkswap /dev/vda && swapon /dev/vda && echo core > /sys/power/pm_test")?;
    machine.command("echo disk > /sys/power/state").timeout(4 * MINUTE).run()?.check()?;
    assert_eq!(machine.modes()?, ALL_FOUR);
    machine.check_next_attach()?;
    work.finish()
}

// Interrupts that nothing can hold back.

#[test]
fn nmis_arrive_as_they_do_natively() -> Result<()> {
    let machine = Machine::boot(plain())?;
    let work = machine.start_work()?;
    let native = nmis(&machine)?;
    machine.mercury("attach")?;
    assert_eq!(nmis(&machine)?, native);
    machine.mercury("detach")?;
    machine.check_next_attach()?;
    work.finish()
}

/// Sends ten NMIs, one after the other. Returns the kernel's message about each, without the
/// varying reason. The kernel may log other work meanwhile, such as the refined frequency of the
/// TSC a second after boot.
fn nmis(machine: &Machine) -> Result<String> {
    let count = "awk '/NMI:/ {print $2}' /proc/interrupts";
    machine.sh("dmesg -C")?;
    for _ in 0..10 {
        let before: u64 = machine.sh(count)?.parse().unwrap();
        machine.qmp()?.inject_nmi()?;
        machine.sh(&format!("until [ $({count}) -gt {before} ]; do sleep 0.02; done"))?;
    }
    machine.sh("dmesg -t | grep -e NMI -e Dazed | sed 's/reason [0-9a-f]*/reason/'")
}

#[test]
#[ignore = "long"]
fn corrected_machine_checks_are_logged_as_natively() -> Result<()> {
    let machine = Machine::boot(spec(Kernel::BookwormGeneric))?;
    let work = machine.start_work()?;
    machine.sh("echo 1 > /sys/devices/system/machinecheck/machinecheck0/check_interval")?;
    machine.sh("echo 1 > /sys/kernel/tracing/events/mce/mce_record/enable")?;
    let native = machine_check(&machine)?;
    machine.mercury("attach")?;
    assert_eq!(machine_check(&machine)?, native);
    machine.mercury("detach")?;
    machine.check_next_attach()?;
    work.finish()
}

/// Returns the kernel's record of a corrected error of CPU 1's bank 5, without the time.
fn machine_check(machine: &Machine) -> Result<String> {
    machine.sh("echo > /sys/kernel/tracing/trace")?;
    let check = MachineCheck {
        cpu: 1,
        bank: 5,
        status: 0x9400_0000_0000_0001,
        address: 0x1000,
        ..Default::default()
    };
    machine.qmp()?.inject_mce(&check)?;
    machine.sh("until grep -q mce_record: /sys/kernel/tracing/trace; do sleep 0.2; done")?;
    machine.sh("sed -n 's/.*mce_record: //; s/TSC: [0-9a-f]*//; s/TIME: [0-9]*//; \
        /^CPU/p' /sys/kernel/tracing/trace")
}

#[test]
#[ignore = "long"]
fn a_fatal_machine_check_ends_in_the_crash_kernel() -> Result<()> {
    let machine = with_crash_kernel(Kernel::BookwormGeneric)?;
    let boots = machine.boots();
    // An uncorrected error with a corrupt context: #MC on CPU 1.
    let check =
        MachineCheck { cpu: 1, bank: 4, status: 0xb200_0000_0000_0800, mcg_status: 4, ..Default::default() };
    machine.qmp()?.inject_mce(&check)?;
    // The kernel's message from inside the exception reaches the console if time allows.
    let perhaps = "Kernel panic - not syncing: Fatal local machine check";
    crash_kernel_runs_after(&machine, boots, "Machine Check Exception: 4 Bank 4", perhaps)?;
    machine.sh("vmcore-dmesg /proc/vmcore | grep 'Kernel panic - not syncing: .*machine check'")?;
    // The error has not been cleared. Another one would be a shutdown.
    assert_eq!(machine.mercury_refused("attach")?.code, "machine-check-in-progress");
    Ok(())
}

/// The sensor that the package contains.
const SENSOR: &str = include_str!("../../packaging/examples/memory-errors");

/// A program in place of the command, which records its arguments.
const ORDERED: &str = "#!/bin/sh\necho \"$*\" >> /run/ordered\n";

/// Counts each corrected error of memory once, even though Debian 13's kernel takes such errors
/// before the memory controller's counters have them (RAS_CEC).
#[test]
#[ignore = "long"]
fn errors_that_the_kernel_keeps_to_itself_are_counted() -> Result<()> {
    let machine = Machine::boot(spec(Kernel::TrixieGeneric))?;
    machine.put("/run/sensor", SENSOR.as_bytes(), 0o755)?;
    machine.sh("mkdir -p /run/bin")?;
    machine.put("/run/bin/mercury", ORDERED.as_bytes(), 0o755)?;
    machine.sh("echo 1 > /sys/devices/system/machinecheck/machinecheck0/check_interval")?;
    // A controller that EDAC knows, and that gets no errors.
    machine.sh(
        "mount -t debugfs none /sys/kernel/debug 2>/dev/null; test -d /sys/kernel/debug/ras/cec && mkdir -p \
         /run/edac/mc0 && echo 0 > /run/edac/mc0/ce_count && mount --bind /run/edac \
         /sys/devices/system/edac/mc",
    )?;
    let sensor =
        |limit: u32| format!("PATH=/run/bin:$PATH /run/sensor {limit}; cat /run/ordered 2>/dev/null || true");
    assert_eq!(machine.sh(&sensor(1))?, "");
    // Bank 4, extended code 8: an error of memory on this family of AMD's.
    let status = 0x9400_0000_0008_0813;
    for count in 1..=2 {
        let check = MachineCheck { cpu: 1, bank: 4, status, address: count << 12, ..Default::default() };
        machine.qmp()?.inject_mce(&check)?;
        let hits = "grep Hits: /sys/kernel/tracing/events/mce/mce_record/hist";
        machine.sh(&format!("until {hits} | grep -qw {count}; do sleep 0.2; done"))?;
    }
    assert_eq!(machine.sh(&sensor(3))?, "", "two are not three");
    machine.sh("echo 0 > /run/mercury-memory-errors")?;
    let order = "evacuate --reason 2 corrected memory errors";
    assert_eq!(machine.sh(&sensor(2))?, order);
    assert_eq!(machine.sh(&sensor(1))?, order, "each counts once");
    Ok(())
}
