//! A kernel that is found in a machine's memory: where its tasks stand, and its log.

use std::fmt::Write as _;

use super::{
    btf::{self, Types},
    dump::{PAGE, bytes_at, translate, u32_at, u64_at},
    kallsyms::Symbols,
};

/// Bytes of a kernel's stack. It ends at a multiple of this.
const STACK: u64 = 16 << 10;
/// The most calls of a stack that are shown.
const CALLS_MAX: usize = 24;
/// The most tasks, threads, modules and records that are read: the memory may be damaged.
const MANY: usize = 100_000;
/// Opcode of a call to a place relative to the next instruction, and its length.
const CALL: u8 = 0xe8;
const CALL_LENGTH: u64 = 5;
/// The end of the names of code through which functions return, against attacks on the processor.
const THUNK: &str = "return_thunk+";
/// Bits of a task's state.
const UNINTERRUPTIBLE: u32 = 2;
const IDLE: u32 = 0x400;
/// The part of a state that says if a record of the log is complete.
const FLAGS: u64 = 3 << 62;

/// A module's name, the places of its code, and its functions.
#[derive(Debug)]
struct Module {
    name: String,
    code: std::ops::Range<u64>,
    functions: Vec<(u64, String)>,
}

/// A kernel in memory.
#[derive(Debug)]
pub struct Kernel<'a> {
    memory: &'a [u8],
    symbols: &'a Symbols,
    types: Option<Types<'a>>,
    /// The physical address of its page tables.
    root: u64,
    modules: Vec<Module>,
}

impl<'a> Kernel<'a> {
    pub fn new(memory: &'a [u8], symbols: &'a Symbols) -> Option<Self> {
        let physical = |name| Some(symbols.physical(symbols.address_of(name)?));
        let types = btf::between(memory, physical("__start_BTF")?, physical("__stop_BTF")?);
        let mut kernel =
            Self { memory, symbols, types, root: physical("init_top_pgt")?, modules: Vec::new() };
        kernel.modules = kernel.find_modules().unwrap_or_default();
        Some(kernel)
    }

    fn bytes(&self, virt: u64, length: u64) -> Option<Vec<u8>> {
        let (mut at, end, mut all) = (virt, virt.checked_add(length)?, Vec::new());
        while at < end {
            let next = end.min((at / PAGE + 1).checked_mul(PAGE)?);
            let piece = bytes_at(self.memory, translate(self.memory, self.root, at)?, (next - at) as usize)?;
            all.extend_from_slice(piece);
            at = next;
        }
        Some(all)
    }

    fn u64(&self, virt: u64) -> Option<u64> {
        u64_at(&self.bytes(virt, 8)?, 0)
    }

    fn u32(&self, virt: u64) -> Option<u32> {
        u32_at(&self.bytes(virt, 4)?, 0)
    }

    fn text(&self, virt: u64, most: u64) -> Option<String> {
        let bytes = self.bytes(virt, most.min(PAGE - virt % PAGE))?;
        Some(String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next()?).into_owned())
    }

    fn offset(&self, path: &[&str]) -> Option<u64> {
        self.types.as_ref()?.offset(path)
    }

    /// Returns the structures on a list of the kernel's. Their list heads are `offset` bytes into them.
    fn list(&self, head: u64, offset: u64) -> Vec<u64> {
        let next = |at: &u64| self.u64(*at).filter(|next| *next != head);
        std::iter::successors(next(&head), next).take(MANY).map(|at| at.wrapping_sub(offset)).collect()
    }

    fn find_modules(&self) -> Option<Vec<Module>> {
        let list = self.offset(&["module", "list"])?;
        let head = self.symbols.address_of("modules")?;
        Some(self.list(head, list).into_iter().filter_map(|module| self.module(module)).collect())
    }

    fn module(&self, module: u64) -> Option<Module> {
        let name = self.text(module + self.offset(&["module", "name"])?, 56)?;
        // The first part of a module's memory is code.
        let (base, size) = match self.offset(&["module", "core_layout", "base"]) {
            Some(base) => (base, self.offset(&["module", "core_layout", "size"])?),
            None => (self.offset(&["module", "mem", "base"])?, self.offset(&["module", "mem", "size"])?),
        };
        let start = self.u64(module + base)?;
        let code = start..start + u64::from(self.u32(module + size)?);
        let functions = self.functions(module, &code).unwrap_or_default();
        Some(Module { name, code, functions })
    }

    /// Returns a module's functions by address, from its table of symbols.
    fn functions(&self, module: u64, code: &std::ops::Range<u64>) -> Option<Vec<(u64, String)>> {
        const SYMBOL: u64 = 24;
        let table = self.u64(module + self.offset(&["module", "kallsyms"])?)?;
        let member = |name| self.offset(&["mod_kallsyms", name]);
        let symbols = self.u64(table + member("symtab")?)?;
        let count = u64::from(self.u32(table + member("num_symtab")?)?).min(MANY as u64);
        let strings = self.u64(table + member("strtab")?)?;
        let all = self.bytes(symbols, count * SYMBOL)?;
        let mut functions: Vec<_> = (0..count)
            .filter_map(|number| {
                let address = u64_at(&all, number * SYMBOL + 8).filter(|address| code.contains(address))?;
                Some((address, self.text(strings + u64::from(u32_at(&all, number * SYMBOL)?), 128)?))
            })
            .filter(|(_, name)| !name.is_empty())
            .collect();
        functions.sort();
        Some(functions)
    }

    fn module_of(&self, address: u64) -> Option<&Module> {
        self.modules.iter().find(|module| module.code.contains(&address))
    }

    pub fn is_code(&self, address: u64) -> bool {
        self.symbols.is_code(address) || self.module_of(address).is_some()
    }

    /// Returns the name of the code at this address.
    pub fn name_of(&self, address: u64) -> String {
        let Some(module) = self.module_of(address) else { return self.symbols.name_of(address) };
        let before = module.functions.partition_point(|(other, _)| *other <= address);
        let (start, name) = module.functions[..before]
            .last()
            .map_or((module.code.start, ""), |(start, name)| (*start, name.as_str()));
        format!("{name}+{:#x} [{}]", address - start, module.name)
    }

    /// Returns the names of the places to which the functions on this stack return: words that point behind
    /// a call. Some may be left from earlier calls. Returns through a thunk leave the thunk's own.
    pub fn calls(&self, stack: u64) -> String {
        let end = (stack / STACK + 1) * STACK;
        let words = (stack.next_multiple_of(8)..end).step_by(8).map_while(|at| self.u64(at));
        let calls = words.filter(|word| {
            let call = word.wrapping_sub(CALL_LENGTH);
            self.is_code(*word) && self.bytes(call, 1) == Some(vec![CALL])
        });
        let names = calls.map(|call| self.name_of(call)).filter(|name| !name.contains(THUNK));
        names.take(CALLS_MAX).collect::<Vec<_>>().join(" < ")
    }

    /// Describes the tasks that run or want to, and those that wait in the kernel without hearing signals.
    pub fn tasks(&self) -> Option<String> {
        let member = |path: &[&str]| self.offset(&[&["task_struct"], path].concat());
        let [tasks, node, signal] = [member(&["tasks"])?, member(&["thread_node"])?, member(&["signal"])?];
        let threads = self.offset(&["signal_struct", "thread_head"])?;
        let [comm, pid, state] = [member(&["comm"])?, member(&["pid"])?, member(&["__state"])?];
        let [on_rq, sleeps, stack] = [member(&["on_rq"])?, member(&["nvcsw"])?, member(&["thread", "sp"])?];
        let first = self.symbols.address_of("init_task")?;
        let mut text = String::new();
        for process in self.list(first + tasks, tasks) {
            let Some(signal) = self.u64(process + signal) else { continue };
            for task in self.list(signal + threads, node) {
                let (Some(state), Some(on_rq)) = (self.u32(task + state), self.u32(task + on_rq)) else {
                    continue;
                };
                if on_rq == 0 && state & (UNINTERRUPTIBLE | IDLE) != UNINTERRUPTIBLE {
                    continue;
                }
                let name = self.text(task + comm, 16).unwrap_or_default();
                let number = self.u32(task + pid).unwrap_or_default();
                let slept = self.u64(task + sleeps).unwrap_or_default();
                let does = if on_rq == 0 { "waits" } else { "wants to run" };
                let calls = self.u64(task + stack).map(|stack| self.calls(stack)).unwrap_or_default();
                let _ = writeln!(
                    text,
                    "{name} {number} {does}, state {state:#x}, has slept {slept} times: {calls}"
                );
            }
        }
        Some(text)
    }

    /// Returns the kernel's log, from the ring that it is in.
    pub fn log(&self) -> Option<String> {
        let ring = self.u64(self.symbols.address_of("prb")?)?;
        let member = |path: &[&str]| Some(ring + self.offset(&[&["printk_ringbuffer"], path].concat())?);
        let descriptors = self.u64(member(&["desc_ring", "descs"])?)?;
        let infos = self.u64(member(&["desc_ring", "infos"])?)?;
        let count = 1u64 << self.u32(member(&["desc_ring", "count_bits"])?)?.min(32);
        let newest = self.u64(member(&["desc_ring", "head_id"])?)?;
        let oldest = self.u64(member(&["desc_ring", "tail_id"])?)?;
        let data = self.u64(member(&["text_data_ring", "data"])?)?;
        let size = 1u64 << self.u32(member(&["text_data_ring", "size_bits"])?)?.min(32);
        let of = |name, part| self.offset(&[name, part]);
        let [begin, next] = ["begin", "next"].map(|end| self.offset(&["prb_desc", "text_blk_lpos", end]));
        let (begin, next, state) = (begin?, next?, of("prb_desc", "state_var")?);
        let [length, time] = ["text_len", "ts_nsec"].map(|part| of("printk_info", part));
        let (length, time) = (length?, time?);
        let (descriptor_size, info_size) = (self.size("prb_desc")?, self.size("printk_info")?);
        let mut text = String::new();
        let mut id = oldest & !FLAGS;
        for _ in 0..=count {
            let descriptor = descriptors + id % count * descriptor_size;
            let info = infos + id % count * info_size;
            let is_whole = self.u64(descriptor + state)? & !FLAGS == id;
            let (from, to) = (self.u64(descriptor + begin)?, self.u64(descriptor + next)?);
            // A record without text has an odd place. One that would not fit before the end begins anew.
            if is_whole && from & 1 == 0 {
                let from = if from / size == to / size { from % size } else { 0 };
                let length = u64::from(self.u32(info + length)? & 0xffff);
                let line = self.bytes(data + from + 8, length)?;
                let seconds = self.u64(info + time)? as f64 / 1e9;
                let _ = writeln!(text, "[{seconds:12.6}] {}", String::from_utf8_lossy(&line));
            }
            if id == newest & !FLAGS {
                break;
            }
            id = id.wrapping_add(1) & !FLAGS;
        }
        Some(text)
    }

    fn size(&self, structure: &str) -> Option<u64> {
        self.types.as_ref()?.size(structure)
    }
}
