//! Virtualization instructions in user mode, AMD's and Intel's. Natively each is #UD, and so are
//! the hypervisor's own calls. While attached, SVM instructions that check the privilege first are
//! #GP, since EFER.SVME is visible (docs/hardware.md, A-51). None may be executed, and no register
//! may change.

use mercury_abi::gate::HYPERCALL_MAGIC;
use serde_json::json;

use crate::{
    Result, cpus,
    recover::{self, Fault, attempt},
    report::Report,
    rng::Rng,
    stop::Stop,
};

const UNDEFINED: Fault = Fault { signal: libc::SIGILL, in_place: true };
const NOT_PERMITTED: Fault = Fault { signal: libc::SIGSEGV, in_place: true };
const STORM: u32 = 50;

/// Runs on each CPU.
pub fn run(stop: &Stop, report: &mut Report) -> Result<()> {
    recover::install()?;
    cpus::on_each(stop, report, |cpu, stop, report| {
        let mut rng = Rng::new(cpu as u64);
        let mut not_permitted = 0u64;
        while !stop.is_set() {
            for _ in 0..STORM {
                hypercall(cpu, &mut rng, report);
            }
            for (name, fault) in vmx() {
                report.check(fault == Some(UNDEFINED), || format!("CPU {cpu}: {name} gave {fault:?}"));
            }
            for (name, fault) in svm() {
                match fault {
                    Some(UNDEFINED) => {}
                    Some(NOT_PERMITTED) => not_permitted += 1,
                    other => report.violation(format!("CPU {cpu}: {name} gave {other:?}")),
                }
            }
            report.pass();
        }
        report.fact(&format!("cpu{cpu}"), json!({ "not_permitted": not_permitted }));
        Ok(())
    })
}

/// Returns arguments that the driver might use, and random ones.
fn arguments(rng: &mut Rng) -> [u64; 4] {
    let number = if rng.once_in(2) { rng.below(6) } else { rng.next() };
    let magic = if rng.once_in(2) { HYPERCALL_MAGIC } else { rng.next() };
    [number, magic, rng.next(), rng.next()]
}

fn hypercall(cpu: usize, rng: &mut Rng, report: &mut Report) {
    let name = if rng.once_in(2) { "VMMCALL" } else { "VMCALL" };
    let before = arguments(rng);
    let [mut rax, mut rcx, mut rdi, mut rsi] = before;
    let mut rdx = before[0] ^ before[2];
    // SAFETY: the instruction faults; this program exists to find out if it does not.
    let fault = unsafe {
        if name == "VMCALL" {
            attempt!(
                "vmcall",
                inout("rax") rax,
                inout("rcx") rcx,
                inout("rdx") rdx,
                inout("rdi") rdi,
                inout("rsi") rsi
            )
        } else {
            attempt!(
                "vmmcall",
                inout("rax") rax,
                inout("rcx") rcx,
                inout("rdx") rdx,
                inout("rdi") rdi,
                inout("rsi") rsi
            )
        }
    };
    report.check(fault == Some(UNDEFINED), || format!("CPU {cpu}: {name}({before:x?}) gave {fault:?}"));
    let kept = [rax, rcx, rdi, rsi] == before && rdx == before[0] ^ before[2];
    report.check(kept, || format!("CPU {cpu}: {name}({before:x?}) changed registers"));
}

fn svm() -> [(&'static str, Option<Fault>); 7] {
    let address = 0x1000u64;
    // SAFETY: none of them can be executed in user mode.
    unsafe {
        [
            ("VMRUN", attempt!("vmrun rax", in("rax") address)),
            ("VMLOAD", attempt!("vmload rax", in("rax") address)),
            ("VMSAVE", attempt!("vmsave rax", in("rax") address)),
            ("STGI", attempt!("stgi")),
            ("CLGI", attempt!("clgi")),
            ("SKINIT", attempt!("skinit eax", in("rax") address)),
            ("INVLPGA", attempt!("invlpga rax, ecx", in("rax") address, in("rcx") 0u64)),
        ]
    }
}

fn vmx() -> [(&'static str, Option<Fault>); 12] {
    let operand = [0x1000u64, 0];
    let at = &raw const operand;
    // SAFETY: as above; VMPTRST, which would write its operand, cannot either.
    unsafe {
        [
            ("VMXON", attempt!("vmxon [{at}]", at = in(reg) at)),
            ("VMXOFF", attempt!("vmxoff")),
            ("VMLAUNCH", attempt!("vmlaunch")),
            ("VMRESUME", attempt!("vmresume")),
            ("VMCLEAR", attempt!("vmclear [{at}]", at = in(reg) at)),
            ("VMPTRLD", attempt!("vmptrld [{at}]", at = in(reg) at)),
            ("VMPTRST", attempt!("vmptrst [{at}]", at = in(reg) at)),
            ("VMREAD", attempt!("vmread rax, {field}", out("rax") _, field = in(reg) 0x6800u64)),
            ("VMWRITE", attempt!("vmwrite {field}, rax", in("rax") 0u64, field = in(reg) 0x6800u64)),
            ("INVEPT", attempt!("invept rax, [{at}]", in("rax") 2u64, at = in(reg) at)),
            ("INVVPID", attempt!("invvpid rax, [{at}]", in("rax") 2u64, at = in(reg) at)),
            ("GETSEC", attempt!("getsec", inout("rax") 0u64 => _, inout("rcx") 0u64 => _)),
        ]
    }
}
