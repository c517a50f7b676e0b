"""Which test shows which property of the four methods, and which shows what is refused.

Numbers are those of the methods' specifications, section "invariants". The tests themselves lie beside what they share
models with; here it is checked that each property has one, that it is there, and that nothing skips it.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SHOWN = {
    "rasat": {
        1: ("tables of zero, or no relations: T5's states and logits",
            "test_rasat::test_zero_tables_or_no_relations_are_t5"),
        2: ("look-up and histogram are a vector for each pair",
            "test_relation_attention::test_output_weights_and_gradients_are_those_of_pairs",
            "test_relation_attention::test_no_tensor_of_pairs_is_made", "test_rasat::test_the_encoder_is_the_sheets"),
        3: ("row 0 has no gradient and stays 0",
            "test_rasat::test_row_zero_gets_no_gradient_and_the_count_is_the_sheets"),
        4: ("a row of a padded batch is the row alone; relations of padding are not read",
            "test_rasat::test_a_row_in_a_padded_batch_is_the_row_alone",
            "test_relations_elsewhere::test_padding_on_the_left_changes_nothing"),
        5: ("beam search scores are those of the sequence",
            "test_rasat::test_beam_search_scores_are_those_of_the_sequence"),
        6: ("every relation by hand, all 45 ids, and those back are those of there",
            "test_relations::test_every_relation_is_the_sheets_and_all_45_occur",
            "test_relations::test_relations_back_are_those_of_there", "test_rasat::test_ids_are_the_official_ones"),
        7: ("all tokens of an item have its row and column",
            "test_relations::test_tokens_have_the_relations_of_their_words"),
        8: ("the oldest turn is cut first", "test_relations::test_old_turns_go_first_and_what_does_not_fit_is_said"),
        9: ("2 (N + 1) d more parameters", "test_rasat::test_row_zero_gets_no_gradient_and_the_count_is_the_sheets"),
        10: ("PICARD: gold queries pass, a wrong name falls at its first impossible character, k = 1 is greedy with a "
             "veto, the end token stays",
             "test_picard::test_gold_queries_are_chains_of_partials_that_end_complete",
             "test_picard::test_a_name_is_refused_at_its_first_impossible_character",
             "test_picard::test_greedy_decoding_is_the_definitions",
             "test_picard::test_the_end_token_outside_the_likeliest_stays_and_a_rejected_one_among_them_goes"),
        11: ("gold against gold is 100 %", "test_sql_match::test_every_right_query_is_right",
             "test_table_verbs::test_gold_against_itself_is_right_and_the_last_dialogue_counts"),
    },
    "akg": {
        1: ("an adapter that adds nothing leaves the host's logits",
            "test_table_text::test_an_adapter_is_its_equation_and_peft_keeps_it"),
        2: ("the adapter's stage changes it alone, the last stage does not change it",
            "test_table_text::test_each_stage_changes_its_own_parameters_alone"),
        3: ("the published counts of parameters", "test_table_text::test_the_papers_counts_and_a_decoder_alone"),
        4: ("masks: filling them gives the sentence, no value word is left, twice is once",
            "test_table_text::test_masks_stand_for_the_tables_words"),
        5: ("the selector's loss is 0 beyond the margin, and violated pairs alone have a gradient",
            "test_table_text::test_a_selector_learns_which_sentences_look_like_descriptions"),
        6: ("ranking is a permutation, and the same again", "test_kept::test_what_is_kept_chooses_as_before",
            "test_table_text::test_a_selector_learns_which_sentences_look_like_descriptions"),
        7: ("a table's line is read back", "test_table_text::test_a_line_is_read_back_and_a_second_key_is_numbered"),
        8: ("lengths of 300, 5, 50 and 90; table, plan, prototypes",
            "test_table_text::test_lengths_are_the_sheets_unless_told",
            "test_table_text::test_a_source_is_table_plan_prototypes_each_within_its_length"),
        9: ("padding and batches do not change descriptions",
            "test_table_text::test_padding_on_either_side_changes_nothing",
            "test_table_text::test_a_decoder_alone_reads_source_cue_and_description_in_one_sequence"),
        10: ("PARENT of a whole reference is 1",
            "test_table_metrics::test_parent_knows_a_perfect_text_and_takes_the_best_reference",
             "test_table_metrics::test_parent_is_its_equation"),
    },
    "promptmize": {
        1: ("no planner and an adapter of zero: the host on the table alone",
            "test_table_text::test_without_a_plan_a_new_zero_adapter_is_the_plain_model"),
        2: ("the pointer follows slots that change places, names none twice, stops",
            "test_table_plans::test_slots_that_change_places_change_the_pointers_scores_alike",
            "test_table_plans::test_a_pointer_names_no_slot_twice_and_stops"),
        3: ("the CRF is the sum over all paths, a beam's is below it",
            "test_table_plans::test_the_crf_is_the_sum_over_all_paths"),
        4: ("only keys of the table are planned", "test_table_plans::test_a_crf_plans_with_keys_of_the_table_alone"),
        5: ("planted orders are found, distractors or not",
            "test_table_plans::test_the_plan_is_the_order_of_the_reference"),
        6: ("a turned plan turns the description", "test_table_plans::test_a_turned_plan_turns_the_description"),
        7: ("stages change their own parameters", "test_table_text::test_each_stage_changes_its_own_parameters_alone"),
        8: ("five tokens an item; table, plan, prototypes",
            "test_table_text::test_a_source_is_table_plan_prototypes_each_within_its_length"),
        9: ("batches do not change descriptions",
            "test_table_text::test_a_generator_learns_and_describes_and_is_loaded_again"),
    },
    "ctrlscitab": {
        1: ("a source is read back",
            "test_ctrlscitab::test_the_four_sources_are_the_tables_of_the_sheet_and_are_read_back"),
        2: ("four variants are the table of the specification",
            "test_ctrlscitab::test_the_four_sources_are_the_tables_of_the_sheet_and_are_read_back"),
        3: ("a planted sentence comes first, scores follow sentences, none comes twice",
            "test_ctrlscitab::test_what_retrievers_have_in_common", "test_ctrlscitab::test_tfidf_is_scikit_learns"),
        4: ("TSDAE decodes from one vector, with the encoder's weights; something is always left",
            "test_ctrlscitab::test_tsdae_decodes_from_one_vector_with_the_encoders_weights"),
        5: ("no held-out text trains a retriever", "test_ctrlscitab::test_no_held_out_text_trains_a_retriever"),
        6: ("a cut source keeps <H> and <CAP>",
            "test_table_text::test_a_cut_source_keeps_its_markers_where_they_have_room"),
        7: ("batches do not change descriptions",
            "test_table_text::test_descriptions_of_rows_are_learned_with_background_that_is_given"),
        8: ("the reference covers highlights that come from it",
            "test_ctrlscitab::test_the_reference_covers_highlights_that_come_from_it"),
        9: ("distinct-1 of one repeated token", "test_table_metrics::test_plans_words_and_variety"),
        10: ("CTRLEval's weights sum to 1", "test_table_metrics::test_ctrleval_is_the_likelihood_of_what_a_mask_hides"),
    },
    "all": {
        1: ("recomputed layers", "test_rasat::test_recomputed_layers_have_the_same_gradients",
            "test_table_text::test_checkpointing_and_bf16_change_nothing_but_memory_and_digits"),
        2: ("bf16",
            "test_rasat::test_bf16_runs_and_is_near",
            "test_relation_attention::test_half_precision_is_near_and_has_its_dtype",
            "test_table_text::test_checkpointing_and_bf16_change_nothing_but_memory_and_digits"),
        3: ("compiled (slow: `make test-all`)", "test_rasat::test_compiled_layers_have_the_same_gradients",
            "test_table_text::test_a_compiled_model_is_the_eager_one"),
        4: ("saved and loaded, by itself and by transformers alone",
            "test_rasat::test_saved_and_loaded_as_itself_and_as_stock",
            "test_table_text::test_a_checkpoint_is_saved_and_loaded_under_any_method",
            "test_loaded_by_strangers::test_relations_and_an_adapter_load_without_an_import_of_fathom"),
        5: ("peft", "test_rasat::test_peft_adapts_it_and_keeps_its_relations",
            "test_table_text::test_an_adapter_is_its_equation_and_peft_keeps_it"),
    },
    "refused": {
        1: ("no SQLite file; a missing, empty, locked database", "test_database::test_what_is_no_database_is_refused"),
        2: ("a question longer than the source, a schema that alone is too long",
            "test_relations::test_old_turns_go_first_and_what_does_not_fit_is_said"),
        3: ("an unknown highlighted cell, a ragged or empty table",
            "test_table_text::test_tables_that_cannot_be_are_refused"),
        4: ("relations of another length, tables for another N",
            "test_rasat::test_relations_that_do_not_fit_are_refused"),
        5: ('a tokenizer without "<"', "test_spoken::test_a_tokenizer_like_t5s_gets_signs_and_keeps_words_apart"),
        6: ("a plan item that is no key", "test_table_plans::test_a_planner_learns_and_is_saved",
            "test_table_text::test_a_source_is_table_plan_prototypes_each_within_its_length"),
        7: ("an adapter of another width", "test_table_text::test_adapters_that_do_not_fit_are_refused"),
        8: ("an extra that is not installed", "test_spoken::test_what_is_not_there_is_named"),
        9: ("BLEURT", "test_table_metrics::test_bleurt_is_refused_with_the_reason"),
        10: ("hostile queries", "test_database::test_a_hostile_query_fails_soon_and_the_files_bytes_stay"),
    },
}  # fmt: skip
COUNTS = {"rasat": 11, "akg": 10, "promptmize": 9, "ctrlscitab": 10}


@functools.cache
def functions(module: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((FOLDER / f"{module}.py").read_text("utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_property_is_listed():
    assert {name: list(SHOWN[name]) for name in COUNTS} == {n: list(range(1, c + 1)) for n, c in COUNTS.items()}


@pytest.mark.parametrize("of", SHOWN)
def test_each_property_is_shown_by_a_test_that_runs(of):
    for number, (said, *tests) in SHOWN[of].items():
        assert tests, f"{of} {number}: nothing shows that {said}"
        for name in tests:
            module, _, function = name.partition("::")
            node = functions(module).get(function)
            assert node is not None, f"{of} {number} ({said}): {name} is not there"
            text = " ".join(map(ast.unparse, node.decorator_list))
            assert "skip" not in text and "xfail" not in text, f"{of} {number}: {name} is left out"
            assert any(isinstance(x, ast.Assert) or "raises" in ast.unparse(x) for x in ast.walk(node)) or (
                "assert_close" in ast.unparse(node) or "subprocess.run" in ast.unparse(node)
            ), f"{of} {number}: {name} asserts nothing"
