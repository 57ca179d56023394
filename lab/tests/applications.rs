//! Applications that would notice a wrong switch. Each runs while the hypervisor goes in and out
//! under it six hundred times on every CPU, and must report no violation.

#![allow(clippy::unwrap_used)]

mod workloads;

use std::time::Duration;

use mercury_lab::{Error, Kernel, Machine, Model, Platform, Result, Spec};
use workloads::{Workloads, load, switch};

/// Cycles of attach and detach: twice as many switches, on every CPU.
const CYCLES: u64 = 600;

fn boot(kernel: Kernel) -> Result<Machine> {
    let machine = Machine::boot(Spec::new(kernel).cpus(2).memory_mib(768))?;
    load(&machine)?;
    Ok(machine)
}

/// Switches under workloads.
fn across(machine: &Machine, all: &[&str]) -> Result<()> {
    let workloads = Workloads::start(machine, all)?;
    switch(machine, CYCLES)?;
    workloads.finish()?;
    machine.check_next_attach()
}

#[test]
fn registers_and_results() -> Result<()> {
    let machine = boot(Kernel::BookwormCloud)?;
    across(&machine, &["compute", "fpu", "flags", "vmmcall", "wrap"])
}

#[test]
fn segments_and_ports() -> Result<()> {
    let machine = boot(Kernel::BookwormCloud)?;
    across(&machine, &["ldt", "ioperm", "compute"])
}

/// Returns the emulator's workloads for hardware breakpoints and for single-stepping. The QEMU of
/// Debian 13's machines misses an execution breakpoint now and then, without a hypervisor too.
fn debugging(kernel: Kernel) -> Result<[&'static str; 2]> {
    Ok(match (Platform::chosen()?, kernel) {
        (Platform::Qemu, Kernel::BookwormCloud) => ["breakpoint", "step"],
        (Platform::Qemu, _) => ["breakpoint --stores", "step"],
        (Platform::Bochs(_), _) => ["breakpoint --stores", "step --without-syscall"],
    })
}

#[test]
fn debug_registers_and_single_steps() -> Result<()> {
    let machine = boot(Kernel::BookwormCloud)?;
    across(&machine, &debugging(Kernel::BookwormCloud)?)
}

#[test]
#[ignore = "long"]
fn samples_of_all_cpus() -> Result<()> {
    let machine = boot(Kernel::BookwormCloud)?;
    across(&machine, &["sampling", "compute"])
}

/// Keeps shadow stacks intact across switches, with the kernel's indirect-branch tracking on as
/// well.
#[test]
#[ignore = "long"]
fn shadow_stacks() -> Result<()> {
    if Platform::chosen()? != Platform::Bochs(Model::TigerLake) {
        return Err(Error::Unsupported { reason: "the processor has no shadow stacks" });
    }
    // The mitigation of ITS in this kernel warns about itself on this processor.
    let spec = Spec::new(Kernel::TrixieCloud).cpus(2).memory_mib(768);
    let machine = Machine::boot(spec.kernel_arg("indirect_target_selection=off"))?;
    load(&machine)?;
    machine.run("dmesg | grep 'Indirect Branch Tracking enabled'")?;
    across(&machine, &["shadow-stack --alone", "flags"])
}

#[test]
#[ignore = "long"]
fn real_time_threads() -> Result<()> {
    let machine = boot(Kernel::BookwormCloud)?;
    across(&machine, &["realtime --limit-us 5000000", "spin"])
}

#[test]
#[ignore = "long"]
fn applications_run_on_debian_13() -> Result<()> {
    let machine = boot(Kernel::TrixieCloud)?;
    let all = ["compute", "fpu", "flags", "vmmcall", "ldt", "ioperm", "sampling", "realtime"];
    across(&machine, &[&all[..], &debugging(Kernel::TrixieCloud)?].concat())
}

/// The first instructions of a deterministic program, one at a time.
const STEPS: &str = "gdb -nx -batch -ex 'set disable-randomization on' -ex starti -ex 'stepi 1500' -ex \
     'print/x $rip' -ex 'print/x $rsp' -ex 'print $_siginfo.si_signo' -ex kill /bin/true 2>&1 | grep '^\\$'";

#[test]
#[ignore = "long"]
fn gdb_single_steps() -> Result<()> {
    let machine = boot(Kernel::BookwormCloud)?;
    let alone = machine.sh(STEPS)?;
    assert!(alone.contains("= 5"), "{alone}");
    assert_eq!(machine.sh(STEPS)?, alone, "it depends on chance after all");
    let mut switching =
        machine.spawn("exec mercury-workload --until-file /run/end switch --fifo 90 --pause-us 2000")?;
    let mut sessions = 0;
    while sessions < 3 {
        assert_eq!(
            machine.command(STEPS).timeout(Duration::from_secs(120)).run()?.check()?.stdout.trim(),
            alone
        );
        assert!(!switching.has_ended()?, "{}", switching.output_so_far()?);
        sessions += 1;
    }
    machine.sh("touch /run/end")?;
    let report = workloads::report(&switching.wait(Duration::from_secs(60))?.check()?);
    println!("beneath {sessions} sessions of gdb: {report}");
    assert!(report["passes"].as_u64().unwrap() > 500, "{report}");
    machine.check_next_attach()
}

/// The function tracer on every function that a switch calls, and kprobes. A function that a probe
/// could break refuses the probe.
const TRACERS: &str = r#"
set -eu
mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing
cd /sys/kernel/tracing
echo 'p:lab/call smp_call_function_single_async' >> kprobe_events
echo 'p:lab/sleep hrtimer_nanosleep' >> kprobe_events
echo 'r:lab/ioctl __x64_sys_ioctl' >> kprobe_events
for name in mercury_VENDOR_attach_cpu mercury_VENDOR_detach_cpu \
	mercury_VENDOR_native_call mercury_VENDOR_mode \
		mercury_VENDOR_enter mercury_VENDOR_leave; do
	grep -qw "$name" /proc/kallsyms || { echo "no symbol $name" >&2; exit 1; }
	if echo "p:lab/$name mercury:$name" >> kprobe_events 2>/dev/null; then
		echo "a probe on $name" >&2
		exit 1
	fi
done
echo ':mod:mercury' > set_ftrace_filter
echo 'schedule* smp_call_function* *hrtimer* *_ipi*' >> set_ftrace_filter
echo function > current_tracer
echo 1 > events/lab/enable
echo 1 > tracing_on
"#;

#[test]
#[ignore = "long"]
fn tracers_and_probes() -> Result<()> {
    let machine = boot(Kernel::BookwormCloud)?;
    machine.sh(&TRACERS.replace("VENDOR", machine.vendor().prefix()))?;
    let workloads = Workloads::start(&machine, &["compute", "sampling"])?;
    switch(&machine, CYCLES)?;
    workloads.finish()?;
    // The kernel gives up reading a buffer that is still written (`rb_iter_peek`), so tracing ends
    // first.
    machine.sh("echo 0 > /sys/kernel/tracing/tracing_on")?;
    for cpu in 0..2 {
        let count =
            format!("grep -cE 'hrtimer|schedule|call' /sys/kernel/tracing/per_cpu/cpu{cpu}/trace || true");
        let lines = machine.sh(&count)?;
        assert!(lines.parse::<u64>().unwrap() > 100, "CPU {cpu} was not traced: {lines} lines");
    }
    let hits = machine.sh("cat /sys/kernel/tracing/kprobe_profile")?;
    println!("{hits}");
    assert!(!hits.lines().any(|line| line.split_whitespace().nth(1) == Some("0")), "{hits}");
    machine.sh("cd /sys/kernel/tracing && echo nop > current_tracer && echo 0 > events/lab/enable && \
                echo > kprobe_events")?;
    machine.check_next_attach()
}
