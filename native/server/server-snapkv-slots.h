// SnapKV in llama-server: the passes, with what the slots have to do with each other
// member functions of server_context_impl, included in its body: they need its slots, queue and batch, which no header declares

// once per task, when the last token of its prompt was decoded; false if the task could not go on
bool snapkv_compact(server_slot & slot) {
    if (!slot.task->params.snapkv.enabled || slot.stats.snapkv.is_set) {
        return true;
    }

    auto stats = server_snapkv_compact(ctx_tgt, slot.id, slot.task->n_tokens(), slot.task->params.snapkv);
    stats.chunks = slot.stats.snapkv.chunks;

    if (stats.status == LLAMA_SNAPKV_STATUS_SEQUENCE_LOST) {
        snapkv_lose(slot, stats.status);
        return false;
    }
    if (stats.status < 0) {
        SLT_WRN(slot, "the prompt was not compacted: %s\n", llama_snapkv_status_str(stats.status));
    }
    if (stats.status == LLAMA_SNAPKV_STATUS_OK) {
        SLT_INF(slot, "compacted %d tokens, %d -> %d cells, %.2f ms\n", stats.n_prompt, stats.n_cells_before, stats.n_cells_after, stats.t_us/1000.0);

        snapkv_update_prompt(slot);

        slot.stats.update_prompt_last(); // it is no part of the generation
    }

    slot.stats.snapkv = stats;
    metrics.snapkv.add(stats);

    return true;
}

// after a pass
void snapkv_update_prompt(server_slot & slot) {
    // nothing before the frontier can be gone back to
    const llama_pos frontier = llama_snapkv_frontier(ctx_tgt, slot.id);
    slot.prompt.checkpoints.remove_if([&](const auto & cur) { return cur.pos_max <= frontier; });
    slot.prompt.snapkv = server_snapkv_state(ctx_tgt, slot.id, slot.task->params.snapkv);
}

// ends the task, with those that wait for its prompt
void snapkv_lose(server_slot & slot, llama_snapkv_status status) {
    const int id_task = slot.task->id;

    slot.prompt_clear();

    for (auto & other : slots) {
        if (other.is_processing() && (other.task->id == id_task || other.task->id_parent == id_task)) {
            send_error(other, llama_snapkv_status_str(status));
            other.release();
        }
    }
}

//
// prompts and answers longer than the cells
//

uint64_t snapkv_i_update = 0;
bool     snapkv_has_pass = false; // between the last batch and the next one
int32_t  snapkv_n_empty  = 0;     // updates in which nobody went on

static bool snapkv_is_reading(const server_slot & slot) {
    return slot.state == SLOT_STATE_STARTED || slot.state == SLOT_STATE_PROCESSING_PROMPT;
}

// a pass in the middle of a prompt or of an answer; if it fails, the task may have ended
llama_snapkv_status snapkv_make_room(server_slot & slot) {
    const bool is_answer = slot.state == SLOT_STATE_GENERATING;

    server_snapkv_chunks chunks;
    auto status = LLAMA_SNAPKV_STATUS_OK;

    common_set_adapter_lora(ctx_tgt, slot.lora);
    queue_tasks.yield_to_queue([&]() {
        status = server_snapkv_make_room(ctx_tgt, slot.id, slot.task->params.snapkv, is_answer ? nullptr : &slot.task->tokens, slot.stats.n_prompt_cached, chunks);
    });

    if (status == LLAMA_SNAPKV_STATUS_SEQUENCE_LOST || status == LLAMA_SNAPKV_STATUS_CANCELLED) {
        snapkv_lose(slot, status);
        return status;
    }
    if (status != LLAMA_SNAPKV_STATUS_OK) {
        SLT_DBG(slot, "no pass: %s\n", llama_snapkv_status_str(status));
        slot.snapkv.i_refused = snapkv_i_update;
        return status;
    }

    snapkv_has_pass    = true;
    slot.snapkv.i_pass = snapkv_i_update;

    snapkv_update_prompt(slot);
    if (!is_answer) {
        slot.prompt.snapkv.n_prompt = slot.task->n_tokens(); // its end has chosen
    }
    SLT_TRC(slot, "made room, %d tokens chose, %d cells released, %d in use\n", chunks.n_window, chunks.n_evicted, slot.prompt.n_tokens() - slot.prompt.snapkv.n_released);

    slot.stats.snapkv.add(chunks, slot.task->n_tokens(), slot.prompt.snapkv.n_released);
    metrics.snapkv.add(chunks);

    return status;
}

// cells of one slot of a unified cache that is idle, or that waits for the prompt of another one
bool snapkv_release_idle() {
    if (try_clear_idle_slots()) {
        return true;
    }
    for (auto & slot : slots) {
        if (params_base.kv_unified && slot.state == SLOT_STATE_WAIT_OTHER && slot.prompt.n_tokens() > 0) {
            slot.prompt_clear();
            return true;
        }
    }
    return false;
}

// the slot whose pass would release the most cells for this one, null if no pass would
server_slot * snapkv_get_largest(server_slot & slot, bool is_own) {
    server_slot * res = nullptr;
    int32_t n_best = 0;

    for (auto & other : slots) {
        const bool is_candidate = (other.state == SLOT_STATE_GENERATING || other.state == SLOT_STATE_PROCESSING_PROMPT) &&
            other.snapkv.is_on() && other.snapkv.i_refused != snapkv_i_update && (!is_own || other.id == slot.id);

        const int32_t n = is_candidate ? server_snapkv_n_releasable(ctx_tgt, other.id, other.task->params.snapkv) : 0;
        if (n > n_best) {
            n_best = n;
            res    = &other;
        }
    }
    return res;
}

// of the prompts that are being read, the one that lost the least begins anew when there is room; n_kept: go on
bool snapkv_start_anew(int32_t n_kept) {
    server_slot * res = nullptr;

    for (auto & slot : slots) {
        if (slot.state != SLOT_STATE_PROCESSING_PROMPT || slot.prompt.n_tokens() == 0 || (mctx && !slot.snapkv.is_on())) {
            continue;
        }
        n_kept--;
        if (!res || slot.prompt.n_tokens() < res->prompt.n_tokens()) {
            res = &slot;
        }
    }
    if (!res || n_kept >= 0) {
        return false;
    }
    SLT_WRN(*res, "no cells are left, the prompt is read anew, %d tokens were read\n", res->prompt.n_tokens());

    snapkv_forget(*res);
    return true;
}

void snapkv_forget(server_slot & slot) {
    slot.prompt_clear();

    slot.snapkv.n_chunk_end       = 0;
    slot.snapkv.is_waiting        = true;
    slot.stats.n_prompt_cached    = 0;
    slot.stats.n_prompt_processed = 0;
    slot.stats.snapkv             = {};

    slot.stats.snapkv.chunks.is_on = slot.snapkv.is_on();
}

// an answer ends for lack of cells
void snapkv_truncate(server_slot & slot) {
    SLT_WRN(slot, "no cells are left, the answer ends after %d tokens\n", (int) slot.stats.n_gen);

    slot.truncated      = true;
    slot.stop           = STOP_TYPE_LIMIT;
    slot.has_next_token = false;

    slot.print_timings();
    send_final_response(slot);
    slot.release();
}

// cells for the next tokens of the answers
void snapkv_begin_update() {
    snapkv_has_pass = false;
    snapkv_i_update++;

    if (!metrics.snapkv.has_chunks) {
        return;
    }

    int32_t n_taken = 0; // of a unified cache
    int32_t n_other = 0; // answers that may draft

    iterate(slots, [&](server_slot & slot) {
        while (slot.state == SLOT_STATE_GENERATING) {
            const int32_t n_need = 1 + slot.spec_draft.size();
            const int32_t n_free = llama_snapkv_n_room(ctx_tgt, slot.id, 0) - n_taken;
            const int32_t n_own  = slot.snapkv.is_on() ? slot.n_ctx - llama_snapkv_n_cells(ctx_tgt, slot.id) : n_need;

            slot.snapkv.n_room      = slot.snapkv.is_on() ? std::min(n_free, n_own) : n_free;
            slot.snapkv.is_deferred = false;

            if (slot.snapkv.n_room >= n_need) {
                n_taken += params_base.kv_unified ? n_need : 0;
                n_other += 1;
                break;
            }

            const bool is_shared = params_base.kv_unified && n_own >= n_need;

            if (is_shared && snapkv_release_idle()) {
                continue;
            }
            if (server_slot * largest = snapkv_get_largest(slot, !is_shared)) {
                if (snapkv_has_pass) {
                    slot.snapkv.is_deferred = true;
                    break;
                }
                snapkv_make_room(*largest);
                continue;
            }
            if (is_shared && snapkv_start_anew(0)) {
                continue;
            }

            server_slot * last = &slot;
            for (auto & other : slots) {
                if (is_shared && other.state == SLOT_STATE_GENERATING && llama_snapkv_n_cells(ctx_tgt, other.id) > llama_snapkv_n_cells(ctx_tgt, last->id)) {
                    last = &other;
                }
            }
            snapkv_truncate(*last);
        }
    });

    // what is left, for drafts; rejected ones must leave the window's queries
    for (auto & slot : slots) {
        if (slot.snapkv.is_on()) {
            slot.snapkv.n_room = std::min<int32_t>(slot.snapkv.n_room, 1 + LLAMA_SNAPKV_N_RING_SLACK);
        }
        if (params_base.kv_unified && slot.state == SLOT_STATE_GENERATING && !slot.snapkv.is_deferred) {
            const int32_t n_left = llama_snapkv_n_room(ctx_tgt, slot.id, 0) - n_taken;
            slot.snapkv.n_room = std::min<int32_t>(slot.snapkv.n_room, 1 + slot.spec_draft.size() + std::max(0, n_left)/n_other);
        }
    }
}

// how many tokens of its prompt a slot can read now, of n_batch that a batch has room for; 0: it waits, or its task has ended
int32_t snapkv_read(server_slot & slot, int32_t n_batch) {
    if (!metrics.snapkv.has_chunks) {
        return n_batch;
    }

    auto & reader = slot.snapkv;

    const int32_t n_prompt = slot.task->n_tokens();

    int32_t n_reading    = 1;
    int32_t n_part       = 1; // of the batch
    int32_t n_generating = 0;

    server_snapkv_surroundings around;
    around.n_cells = slot.n_ctx;

    for (const auto & other : slots) {
        if (other.id == slot.id) {
            continue;
        }
        if (snapkv_is_reading(other) && !other.snapkv.is_waiting) {
            n_reading += 1;
            n_part    += other.id > slot.id;
        }
        n_generating += other.state == SLOT_STATE_GENERATING;

        if (params_base.kv_unified && other.is_processing() && other.state != SLOT_STATE_WAIT_OTHER && other.prompt.n_tokens() > 0) {
            around.is_alone = false;
        }
        if (params_base.kv_unified && other.state == SLOT_STATE_PROCESSING_PROMPT && !other.snapkv.is_on() && other.prompt.n_tokens() > 0) {
            around.n_spared += other.task->n_tokens() - other.prompt.n_tokens(); // it cannot make room
        }
    }

    const int32_t n_max = std::max(1, n_batch/n_part);

    if (params_base.kv_unified) {
        const int32_t n_updates = n_reading + std::min(n_prompt - slot.prompt.n_tokens(), slot.task->params.snapkv.chunk)/n_max + 1;

        around.n_share      = n_ctx/params_base.n_parallel;
        around.n_taken      = batch.size();
        around.n_spared    += std::min(n_generating*n_updates, slot.n_ctx/8);
        around.release_idle = [this]() { return snapkv_release_idle(); };
    }

    while (true) {
        const auto next = reader.next(ctx_tgt, slot.id, slot.task->params.snapkv, slot.stats.n_prompt_cached, slot.prompt.n_tokens(), n_prompt, around);

        reader.is_deferred = next.make_room && !snapkv_can_pass(slot);
        reader.is_waiting  = next.n_tokens == 0 && !next.make_room;

        if (!next.is_stuck && (!next.make_room || reader.is_deferred)) {
            return std::min(next.n_tokens, n_max);
        }

        const auto status = next.make_room ? snapkv_make_room(slot) : LLAMA_SNAPKV_STATUS_NO_ROOM;

        if (!slot.is_processing()) {
            return 0;
        }
        if (status != LLAMA_SNAPKV_STATUS_OK && slot.stats.n_prompt_cached > 0) {
            snapkv_forget(slot); // what was there is in the way, and cannot be compacted
            continue;
        }
        if (status != LLAMA_SNAPKV_STATUS_OK) {
            send_error(slot, llama_snapkv_status_str(status));
            slot.release();
            return 0;
        }
    }
}

// one pass between two batches, in turns
bool snapkv_can_pass(const server_slot & slot) const {
    return !snapkv_has_pass && std::none_of(slots.begin(), slots.end(), [&](const server_slot & other) {
        return snapkv_is_reading(other) && other.snapkv.is_deferred && other.snapkv.i_pass < slot.snapkv.i_pass;
    });
}

// nobody goes on, and each waits for the cells of another one
void snapkv_end_update() {
    const auto is_waiting = [](const server_slot & slot) { return slot.state == SLOT_STATE_PROCESSING_PROMPT && slot.snapkv.is_waiting; };

    const auto it = std::find_if(slots.begin(), slots.end(), is_waiting);

    if (batch.size() > 0 || snapkv_has_pass || it == slots.end()) {
        snapkv_n_empty = 0;
    } else if (++snapkv_n_empty > 1 && !snapkv_start_anew(1) && snapkv_n_empty > 3) {
        send_error(*it, llama_snapkv_status_str(LLAMA_SNAPKV_STATUS_NO_ROOM));
        it->release();
    }
}
