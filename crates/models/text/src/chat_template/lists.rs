//! Lists that a template can change: `{% set ids = [] %}{% set _ = ids.append(id) %}`. Some
//! published templates do, Kimi K2's for example; minijinja's own lists never change.
//!
//! Only lists that the template writes itself are of this kind. The conversation stays as it is.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use minijinja::machinery::Instruction;
use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::limits::{Budget, refused};

/// The function that makes a list of a literal. Templates cannot call it, because it is not an
/// identifier.
pub(super) const LIST: &str = "list: new";

/// A list that can be changed. It never contains itself, so that it is freed with its last user.
#[derive(Debug, Default)]
struct List {
    items: Mutex<Vec<Value>>,
}

/// Whether an instruction puts a list on the stack that the template has written.
pub(super) fn is_literal(instruction: &Instruction<'_>) -> bool {
    match instruction {
        Instruction::LoadConst(value) => value.kind() == ValueKind::Seq,
        Instruction::BuildList(count) => count.is_some(),
        _ => false,
    }
}

/// Adds the function that makes lists.
pub(super) fn add(environment: &mut Environment<'static>) {
    environment.add_function(LIST, |state: &State<'_, '_>, literal: &Value| {
        Budget::of(state).charge_items(literal)?;
        let items = Mutex::new(literal.try_iter()?.collect());
        Ok::<_, Error>(Value::from_object(List { items }))
    });
}

impl List {
    fn items(&self) -> MutexGuard<'_, Vec<Value>> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a value that contains this list. Its depth has been measured.
    fn check_no_cycle(&self, value: &Value) -> Result<(), Error> {
        if value.downcast_object_ref::<Self>().is_some_and(|list| std::ptr::eq(list, self)) {
            return Err(refused("expected a list that does not contain itself"));
        }
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                value.try_iter()?.try_for_each(|item| self.check_no_cycle(&item))
            }
            ValueKind::Map => value
                .try_iter()?
                .try_for_each(|key| self.check_no_cycle(&value.get_item(&key).unwrap_or_default())),
            _ => Ok(()),
        }
    }

    /// The place of an item, counted from the end if it is negative. At most the length.
    fn place(&self, index: i64) -> usize {
        let len = self.items().len();
        let distance = usize::try_from(index.unsigned_abs()).unwrap_or(usize::MAX);
        if index < 0 { len.saturating_sub(distance) } else { distance.min(len) }
    }
}

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items().get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items().len())
    }

    fn call_method(
        self: &Arc<Self>,
        state: &State<'_, '_>,
        method: &str,
        arguments: &[Value],
    ) -> Result<Value, Error> {
        let added = match method {
            "append" | "extend" => arguments.first(),
            "insert" => arguments.get(1),
            _ => None,
        };
        let budget = Budget::of(state);
        budget.charge_values(1)?;
        if let Some(added) = added {
            budget.measure(added)?;
            self.check_no_cycle(added)?;
        }
        match method {
            "append" => {
                let (item,) = from_args(arguments)?;
                self.items().push(item);
            }
            "extend" => {
                let (items,): (Value,) = from_args(arguments)?;
                let items: Vec<Value> = items.try_iter()?.collect();
                self.items().extend(items);
            }
            "insert" => {
                let (index, item) = from_args(arguments)?;
                let place = self.place(index);
                budget.charge_values(self.items().len())?;
                self.items().insert(place, item);
            }
            "pop" => {
                let (index,): (Option<i64>,) = from_args(arguments)?;
                let place = self.place(index.unwrap_or(-1));
                let mut items = self.items();
                if place >= items.len() {
                    return Err(refused("pop: the list has no such item"));
                }
                budget.charge_values(items.len() - place)?;
                return Ok(items.remove(place));
            }
            "clear" => {
                let () = from_args(arguments)?;
                self.items().clear();
            }
            "reverse" => {
                let () = from_args(arguments)?;
                budget.charge_values(self.items().len())?;
                self.items().reverse();
            }
            // Methods that change nothing are the same as for all lists.
            _ => return Err(ErrorKind::UnknownMethod.into()),
        }
        Ok(Value::from(()))
    }
}
